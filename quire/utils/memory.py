"""How much memory this process may still take, as the system and its control group see it."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes: the smaller of the system's available memory and what is left under each control group's limit.

    root: where proc/ and sys/ are mounted, for tests. Raises OSError on a system without /proc.
    """
    return min(_system_available(root), *_cgroup_rooms(root))


def _system_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus use of the process's memory groups and their parents, version 2 and version 1.

    Page cache counts as used but is given back under pressure, so its inactive part is taken off the use.
    """
    rooms = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # Inside a container the group's path may not exist below the mount; then the mount itself is the group.
        path = Path(group.lstrip("/"))
        for directory in (base / part for part in (path, *path.parents)):
            bound, used = _read(directory / limit).strip(), _read(directory / usage).strip()
            if bound.isdigit() and used.isdigit():
                rooms.append(max(0, int(bound) - int(used) + _statistic(directory / "memory.stat", cache)))
    return rooms or [2**63 - 1]


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    """The file's text; empty where there is none (no such controller) or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
