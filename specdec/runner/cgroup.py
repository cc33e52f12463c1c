"""The memory and CPU time that a container allows this process, read from its control groups.

Knows both versions of Linux control groups; without control groups nothing is limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def memory_left(root: Path = Path("/")) -> float:
    """Bytes left until the nearest limit; infinite without a limit. Memory that the kernel can drop at once is left."""
    return min((_left(group) for group in _groups("memory", root)), default=math.inf)


def cpu_quota(root: Path = Path("/")) -> float:
    """Number of CPUs this process may use, as a share of time; infinite without a limit."""
    return min((_quota(group) for group in _groups("cpu", root)), default=math.inf)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The directories of this process's control group and of all groups that contain it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    # Version 1 has a hierarchy per controller; version 2 has a single one without a name.
    mounted = [path for names, path in paths.items() if controller in names.split(",")]
    base = root / "sys/fs/cgroup" / (controller if mounted else "")
    group = base / (mounted[0] if mounted else paths.get("", "/")).lstrip("/")
    # In a container the path may be the host's, but only its end is mounted. Directories that do not exist are skipped.
    while True:
        yield group
        if group == base or base not in group.parents:
            return
        group = group.parent


def _left(group: Path) -> float:
    limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
    used = _number(group / "memory.current", group / "memory.usage_in_bytes")
    if math.isinf(limit) or math.isinf(used):
        return math.inf
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        stat = {}
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(0.0, limit - used + droppable)


def _quota(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return math.inf if math.isinf(quota_us) or quota_us <= 0 else quota_us / period_us


def _number(*files: Path) -> float:
    """The number in the first of ``files`` that has one; infinite if none has."""
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # version 2 writes "max"
            continue
    return math.inf
