"""Measuring memory, on made-up machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.kernels.cpu.memory import allocate
from quire.worker.platform.host_memory import available_memory, measure_peak, resident_memory
from tests.long import one_in

MIB = 2**20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 4096 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2_group(directory: str, limit: str, use: int, cache: int) -> dict[str, str]:
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.current": f"{use}\n",
        f"{directory}/memory.stat": f"anon 5\nactive_file 7\ninactive_file {cache}\n",
    }


def test_without_limits_what_the_system_has_available(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {})) == 4096 * 1024


def test_unlimited_groups_do_not_count(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/app\n", **v2_group("sys/fs/cgroup/app", "max", 500, 0)}
    assert available_memory(machine(tmp_path, files)) == 4096 * 1024


def test_the_tightest_group_of_the_path_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/app\n",
        **v2_group("sys/fs/cgroup/pod", str(3 * MIB), 2 * MIB, MIB // 2),
        **v2_group("sys/fs/cgroup/pod/app", str(2 * MIB), MIB // 4, 0),
    }
    assert available_memory(machine(tmp_path, files)) == 3 * MIB // 2


def test_in_a_container_the_group_is_the_mount_itself(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../host/path\n", **v2_group("sys/fs/cgroup", str(2 * MIB), MIB, 0)}
    assert available_memory(machine(tmp_path, files)) == MIB


def test_version_one_groups(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{3 * MIB}\n",
        f"{group}/memory.usage_in_bytes": f"{2 * MIB}\n",
        f"{group}/memory.stat": f"cache 1\ninactive_file 3\ntotal_inactive_file {MIB // 4}\n",
    }
    assert available_memory(machine(tmp_path, files)) == MIB + MIB // 4


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", **v2_group("sys/fs/cgroup", str(MIB), 2 * MIB, 0)}
    assert available_memory(machine(tmp_path, files)) == 0


def test_a_system_without_proc_counts_its_physical_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert resident_memory(tmp_path) is None


def test_this_machine() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process(root: Path, *, peak: int, resident: int) -> None:
    (root / "proc/self/status").write_text(f"Name: x\nVmHWM: {peak} kB\nVmRSS: {resident} kB\n")


def test_the_peak_is_what_the_system_says(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/status": "", "proc/self/clear_refs": ""})
    process(root, peak=500, resident=500)
    assert measure_peak(lambda: process(root, peak=800, resident=510), root) == 300 * 1024
    assert (root / "proc/self/clear_refs").read_text() == "5"


@pytest.mark.long
def test_the_peak_of_this_process() -> None:
    """Where the system can tell (Linux does): what was freed again counts, what was freed before does not. Mappings:
    the C library may hand out memory again that an earlier test has freed and that is still resident."""
    allocate(512 * MIB).fill_(1)
    peak = measure_peak(lambda: [allocate(64 * MIB).fill_(1) for _ in range(2)])
    assert peak is None or 120 * MIB <= peak < 300 * MIB


@pytest.mark.parametrize(
    ("has_clear_refs", "status"),
    one_in(
        4,
        [
            (False, "VmHWM: 9 kB\nVmRSS: 9 kB\n"),
            (True, "VmHWM: 99000 kB\nVmRSS: 9 kB\n"),
            (True, "VmRSS: 9 kB\n"),
            (True, "Name: x\n"),
        ],
    ),
    ids=["forbidden", "without effect", "no peak", "nothing"],
)
def test_where_the_peak_cannot_be_measured_the_work_is_done_all_the_same(
    tmp_path: Path, has_clear_refs: bool, status: str
) -> None:
    root = machine(tmp_path, {"proc/self/status": status})
    if has_clear_refs:
        (root / "proc/self/clear_refs").write_text("")
    else:
        (root / "proc/self/clear_refs").mkdir()
    done = []
    assert measure_peak(lambda: done.append(1), root) is None
    assert done == [1]


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"})
    with pytest.raises(ValueError, match="MemAvailable:"):
        available_memory(root)
