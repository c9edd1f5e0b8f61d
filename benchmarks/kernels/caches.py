"""How large the processor's caches are, so that measurements can go past them."""

from __future__ import annotations

import os
from pathlib import Path

from quire.utils.sizes import parse_bytes

CPU_FOLDER = Path("/sys/devices/system/cpu")
ASSUMED_BYTES = 64 << 20
"""Where the system does not tell."""


def last_level_cache_bytes(folder: Path = CPU_FOLDER) -> int:
    """Of all last-level caches that serve the cores of this process. folder: where the system describes its cores."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    found: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in folder.glob(f"cpu{core}/cache/index*"):
            try:
                level, size, sharers = (
                    (index / name).read_text(encoding="ascii").strip() for name in ("level", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            found[int(level), sharers] = parse_bytes(size, param="cache size")
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or ASSUMED_BYTES
