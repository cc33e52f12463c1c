"""Limits of containers, as both versions of control groups write them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from specdec.runner.cgroup import cpu_quota, memory_left

GIB = 1 << 30


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_without_control_groups_nothing_is_limited(root):
    assert memory_left(root) == cpu_quota(root) == math.inf


def test_version_2_in_a_container(root):
    own = "sys/fs/cgroup"
    write(root, {"proc/self/cgroup": "0::/", f"{own}/memory.max": 4 * GIB, f"{own}/memory.current": 3 * GIB})
    assert memory_left(root) == GIB
    write(root, {f"{own}/memory.stat": f"anon 5\ninactive_file {GIB // 2}"})
    assert memory_left(root) == 1.5 * GIB
    write(root, {f"{own}/cpu.max": "150000 100000"})
    assert cpu_quota(root) == 1.5


def test_version_2_without_limits(root):
    own = "sys/fs/cgroup/user.slice"
    write(root, {"proc/self/cgroup": "0::/user.slice", f"{own}/memory.max": "max", f"{own}/memory.current": GIB})
    write(root, {f"{own}/cpu.max": "max 100000"})
    assert memory_left(root) == cpu_quota(root) == math.inf


def test_the_nearest_limit_of_all_groups_around_counts(root):
    outer, inner = "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"
    write(root, {"proc/self/cgroup": "0::/a/b", f"{outer}/memory.max": 2 * GIB, f"{outer}/memory.current": 2 * GIB - 7})
    write(root, {f"{inner}/memory.max": GIB, f"{inner}/memory.current": 5, f"{outer}/cpu.max": "200000 100000"})
    write(root, {f"{inner}/cpu.max": "400000 100000"})
    assert memory_left(root) == 7
    assert cpu_quota(root) == 2


def test_version_1_with_a_path_of_the_host(root):
    lines = "5:devices:/docker/x\n4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n0::/"
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu"
    write(root, {"proc/self/cgroup": lines, f"{memory}/memory.limit_in_bytes": GIB})
    write(root, {f"{memory}/memory.usage_in_bytes": GIB // 4, f"{memory}/memory.stat": "total_inactive_file 3"})
    assert memory_left(root) == GIB * 3 // 4 + 3
    write(root, {f"{cpu}/cpu.cfs_quota_us": -1, f"{cpu}/cpu.cfs_period_us": 100000})
    assert cpu_quota(root) == math.inf
    write(root, {f"{cpu}/docker/x/cpu.cfs_quota_us": 50000, f"{cpu}/docker/x/cpu.cfs_period_us": 100000})
    assert cpu_quota(root) == 0.5


def test_this_machine_can_be_read():
    assert memory_left() > 0
    assert cpu_quota() > 0
