"""Limits of containers, as both versions of control groups write them."""

from __future__ import annotations

import math
from pathlib import Path

from specdec.runner.cgroup import cpu_quota, memory_left

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_version_2_in_a_container(tmp_path):
    group = "sys/fs/cgroup"
    write(tmp_path, {"proc/self/cgroup": "0::/", f"{group}/memory.max": 4 * GIB, f"{group}/memory.current": 3 * GIB})
    assert memory_left(tmp_path) == GIB
    write(tmp_path, {f"{group}/memory.stat": f"anon 5\ninactive_file {GIB // 2}"})
    assert memory_left(tmp_path) == 1.5 * GIB
    write(tmp_path, {f"{group}/cpu.max": "150000 100000"})
    assert cpu_quota(tmp_path) == 1.5


def test_without_control_groups_or_limits_nothing_is_limited(tmp_path):
    assert memory_left(tmp_path) == cpu_quota(tmp_path) == math.inf
    group = "sys/fs/cgroup/user.slice"
    write(
        tmp_path, {"proc/self/cgroup": "0::/user.slice", f"{group}/memory.max": "max", f"{group}/memory.current": GIB}
    )
    write(tmp_path, {f"{group}/cpu.max": "max 100000"})
    assert memory_left(tmp_path) == cpu_quota(tmp_path) == math.inf


def test_the_nearest_limit_of_all_groups_around_counts(tmp_path):
    outer, inner = "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"
    write(
        tmp_path,
        {"proc/self/cgroup": "0::/a/b", f"{outer}/memory.max": 2 * GIB, f"{outer}/memory.current": 2 * GIB - 7},
    )
    write(tmp_path, {f"{inner}/memory.max": GIB, f"{inner}/memory.current": 5, f"{outer}/cpu.max": "200000 100000"})
    write(tmp_path, {f"{inner}/cpu.max": "400000 100000"})
    assert memory_left(tmp_path) == 7
    assert cpu_quota(tmp_path) == 2


def test_version_1_with_a_path_of_the_host(tmp_path):
    lines = "5:devices:/docker/x\n4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n0::/"
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu"
    write(tmp_path, {"proc/self/cgroup": lines, f"{memory}/memory.limit_in_bytes": GIB})
    write(tmp_path, {f"{memory}/memory.usage_in_bytes": GIB // 4, f"{memory}/memory.stat": "total_inactive_file 3"})
    assert memory_left(tmp_path) == GIB * 3 // 4 + 3
    write(tmp_path, {f"{cpu}/cpu.cfs_quota_us": -1, f"{cpu}/cpu.cfs_period_us": 100000})
    assert cpu_quota(tmp_path) == math.inf
    write(tmp_path, {f"{cpu}/docker/x/cpu.cfs_quota_us": 50000, f"{cpu}/docker/x/cpu.cfs_period_us": 100000})
    assert cpu_quota(tmp_path) == 0.5


def test_this_machine_can_be_read():
    assert memory_left() > 0
    assert cpu_quota() > 0
