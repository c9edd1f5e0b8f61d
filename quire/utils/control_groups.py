"""Linux control groups (v1, v2) of this process, and their CPU limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire import envs

ROOT = Path("/")


def group_directories(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Directories of the groups that limit this process by `controller` ("memory", "cpu"), innermost first, the mount
    itself last. root: parent of /proc and /sys."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time in cores allowed by the tightest group of this process; None: no limit."""
    found = []
    for directory in group_directories("cpu", root):
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        elif (directory / "cpu.cfs_quota_us").exists():
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        else:
            continue
        if quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def usable_cores(root: Path = ROOT) -> int:
    """Number of threads that can always compute: cores of the affinity mask within the quota, at least 1."""
    quota = cpu_quota(root)
    cores = envs.affinity_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))
