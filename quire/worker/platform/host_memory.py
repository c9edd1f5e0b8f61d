"""Measuring memory on Linux: what this process could still take, and how much a piece of work takes at its peak."""

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
"""(limit, use, field of memory.stat) of a group, by the second and the first version."""
RESET_PEAK = "5"
"""Written to clear_refs, this resets the peak of the resident set to its present size."""
RESET_TOLERANCE = 16 * 2**20
"""Bytes that other threads may have allocated between the reset and the check of it."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process could still take: the smaller of what the system has available and what the limits of its
    control groups (v1 or v2, every level) leave, page cache that can be dropped counted as free.

    root: the folder of /proc and /sys. Where there is no /proc/meminfo, all physical memory is counted.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([_field(meminfo, "MemAvailable:") * 1024, *_cgroup_headroom(root)]))


def resident_memory(root: Path = ROOT) -> int | None:
    """Bytes of this process in physical memory, None where the system does not say."""
    return _status(root, "VmRSS:")


def measure_peak(work: Callable[[], object], root: Path = ROOT) -> int | None:
    """Run `work`; return how many bytes the resident memory grew at its peak.

    Exact (the kernel keeps the peak), except that other threads of the process count as well, which errs on the safe
    side. Returns None, having run `work`, where the system does not let a process reset its peak.
    """
    can_reset = _reset_peak(root)
    before = resident_memory(root)
    with without_collections():  # which would free what was there before, and hide what is taken
        work()
    after = _status(root, "VmHWM:")
    if not can_reset or before is None or after is None:
        return None
    return max(0, after - before)


def _reset_peak(root: Path) -> bool:
    """Set the peak of the resident memory to its present size. Returns whether the system did."""
    try:
        (root / "proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    peak, now = _status(root, "VmHWM:"), resident_memory(root)
    # Some systems accept the request and do nothing.
    return peak is not None and now is not None and peak <= now + RESET_TOLERANCE


def _status(root: Path, name: str) -> int | None:
    """A size in bytes from this process's status."""
    try:
        return _field(root / "proc/self/status", name) * 1024
    except (OSError, ValueError):
        return None


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Bytes left in each control group that limits this process: limit - use + page cache that can be dropped."""
    for directory in group_directories("memory", root):
        for limit_name, use_name, cache_field in GROUP_FILES:
            limit, use = directory / limit_name, directory / use_name
            if limit.exists() and use.exists() and (text := limit.read_text().strip()) != "max":
                yield int(text) - int(use.read_text()) + _field(directory / "memory.stat", cache_field)


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of lines `name number ...`."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no field {name!r}")
