"""Memory measurement on Linux: available memory, and the peak of a piece of work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.utils.control_groups import ROOT, group_directories
from quire.utils.garbage import without_collections

GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""(limit, usage, field of memory.stat) of a cgroup, version 2 and 1."""
RESET_PEAK = "5"
"""Value for clear_refs that resets the peak of the resident set."""
RESET_TOLERANCE = 16 * 2**20
"""Bytes that other threads may allocate between the reset and its check."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes available to this process: the minimum of the system's and its cgroups' (v1 or v2, every level), with
    reclaimable page cache counted as free. root: folder of /proc and /sys."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([_field(meminfo, "MemAvailable:") * 1024, *_cgroup_headroom(root)]))


def resident_memory(root: Path = ROOT) -> int | None:
    """Resident bytes of this process; None if unknown. root: "/", which tests replace."""
    return _status(root, "VmRSS:")


def measure_peak(work: Callable[[], object], root: Path = ROOT) -> int | None:
    """Run `work` and return the peak growth of resident memory in bytes; None if the system cannot reset the peak.
    Exact, except that other threads count too."""
    can_reset = _reset_peak(root)
    before = resident_memory(root)
    with without_collections():  # a collection would free older memory and hide the growth
        work()
    after = _status(root, "VmHWM:")
    if not can_reset or before is None or after is None:
        return None
    return max(0, after - before)


def _reset_peak(root: Path) -> bool:
    try:
        (root / "proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    peak, now = _status(root, "VmHWM:"), resident_memory(root)
    # Some systems accept the request and do nothing.
    return peak is not None and now is not None and peak <= now + RESET_TOLERANCE


def _status(root: Path, name: str) -> int | None:
    try:
        return _field(root / "proc/self/status", name) * 1024
    except (OSError, ValueError):
        return None


def _cgroup_headroom(root: Path) -> Iterator[int]:
    for directory in group_directories("memory", root):
        for limit_name, use_name, cache_field in GROUP_FILES:
            limit, use = directory / limit_name, directory / use_name
            if limit.exists() and use.exists() and (text := limit.read_text().strip()) != "max":
                yield int(text) - int(use.read_text()) + _field(directory / "memory.stat", cache_field)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no field {name!r}")
