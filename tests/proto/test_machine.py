"""CPU and memory limits, read from a fake /proc and /sys; own limits."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from proto.runtime.host_resources import (
    allowed_cores,
    available_memory,
    cores_by_node,
    cpu_limit,
    node_of_worker,
    total_memory,
    usable_cores,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {16 * GIB // 1024} kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/system.slice/tokend.service\n",
                "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/system.slice/tokend.service/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/other.slice/cpu.max": "10000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_smallest_cpu_limit_of_nested_cgroups_applies(
    files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    assert cpu_limit(write(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000", 2), ("50000", 1), ("900000", 3), ("max", 3)]
)
def test_usable_cores_follow_affinity_smt_siblings_and_quota(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proto.runtime.host_resources.ALLOWED_CPUS", frozenset({0, 1, 2, 5}))
    siblings = {0: "0,2", 1: "1,3", 2: "0,2"}
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for cpu, text in siblings.items()
    }
    write(tmp_path, files | {"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
    assert usable_cores(tmp_path) == cores
    assert allowed_cores(tmp_path) == 3


def test_usable_cores_without_topology_files_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: Iterable[int]) -> Path:
    """Two memory nodes of four cores with two hardware threads each, numbered in turn."""
    monkeypatch.setattr("proto.runtime.host_resources.ALLOWED_CPUS", frozenset(cpus))
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}"
        for cpu in range(16)
    }
    nodes = {
        "sys/devices/system/node/node0/cpulist": "0,2,4,6,8,10,12,14\n",
        "sys/devices/system/node/node1/cpulist": "1,3,5,7,9,11,13,15\n",
        "sys/devices/system/node/node2/cpulist": "\n",  # memory without CPUs
        "sys/devices/system/node/online": "0-2\n",
    }
    return write(tmp_path, siblings | nodes)


def test_cores_by_memory_node_follow_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_nodes(tmp_path, monkeypatch, range(16))
    assert cores_by_node(root) == {
        0: [[0, 8], [2, 10], [4, 12], [6, 14]],
        1: [[1, 9], [3, 11], [5, 13], [7, 15]],
    }
    root = two_nodes(tmp_path, monkeypatch, (2, 4, 10))
    assert cores_by_node(root) == {0: [[2, 10], [4]]}
    ranges = {"sys/devices/system/node/node0/cpulist": "0-2,4\n"}
    assert cores_by_node(write(tmp_path / "one", ranges)) == {0: [[2], [4]]}
    assert cores_by_node(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("cpus", "num_threads", "nodes"),
    [
        (range(16), 4, [0, 1]),
        (range(16), 2, [0, 1, 0, 1]),
        (range(16), 1, [0, 1]),  # far apart, though one node has room for both
        (range(16), 3, [0, 1]),
        ((0, 2, 4, 6, 1, 3), 2, [0, 0, 1]),
        (range(16), 5, [None, None]),  # no node has as many cores
        ((0, 2, 4, 1, 3, 5), 2, [0, 1, None]),  # what is left is a core of each
        ((0, 2, 4), 1, [None, None]),  # one node
    ],
)
def test_each_worker_gets_the_cores_of_one_memory_node(
    cpus: Iterable[int],
    num_threads: int,
    nodes: list[int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = two_nodes(tmp_path, monkeypatch, cpus)
    workers = range(len(nodes))
    assert [node_of_worker(each, len(workers), num_threads, root) for each in workers] == nodes


def memory(folder: str, limit: str, used: int, names: tuple[str, str, str]) -> dict[str, str]:
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\n{names[2]} {GIB}\n",
    }


CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("limit", "left"), [(str(8 * GIB), 6 * GIB), ("max", 16 * GIB), (str(64 * GIB), 16 * GIB)]
)
@pytest.mark.parametrize("version", [1, 2])
def test_available_memory_respects_the_cgroup_limit(
    version: int, limit: str, left: int, tmp_path: Path
) -> None:
    own, folder, names = {
        1: ("7:memory:/a/b\n", "sys/fs/cgroup/memory/a", CGROUP_V1),
        2: ("0::/a/b\n", "sys/fs/cgroup/a", CGROUP_V2),
    }[version]
    files = {"proc/self/cgroup": own, **memory(folder, limit, 3 * GIB, names)}
    assert available_memory(write(tmp_path, files)) == left


def test_available_memory_is_zero_above_the_cgroup_limit(tmp_path: Path) -> None:
    files = memory("sys/fs/cgroup", str(GIB), 9 * GIB, CGROUP_V2)
    assert available_memory(write(tmp_path, files)) == 0


LIMITED = """
import os, resource, signal
from proto.runtime.host_resources import process_limits
limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
before = [resource.getrlimit(limit) for limit in limits]
with process_limits(60.0, 1 << 30):
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGABRT and not os.WCOREDUMP(status)
    else:
        os.abort()
assert [resource.getrlimit(limit) for limit in limits] == before
assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
"""


def test_a_crash_within_limits_leaves_no_core_file(tmp_path) -> None:
    """After them the process has its own limits again, soft ones that differ from hard ones too."""

    def set_limits() -> None:
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, most))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))

    command = [sys.executable, "-c", LIMITED]
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=tmp_path, env=env, preexec_fn=set_limits, check=True)
    assert not list(tmp_path.iterdir())


def test_total_memory_is_that_of_the_machine_or_of_the_tightest_group(tmp_path: Path) -> None:
    own, limit = "sys/fs/cgroup/a/b/memory.max", "sys/fs/cgroup/a/memory.max"
    root = write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", own: "max\n", limit: "50000\n"})
    assert total_memory(root) == 50_000
    (root / limit).write_text("max\n")
    assert total_memory(root) == 99 * 1024
