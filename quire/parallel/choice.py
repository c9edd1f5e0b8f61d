"""Collectives of a configuration."""

from __future__ import annotations

from pathlib import Path

from quire.config.device import BETWEEN_DEVICES, BETWEEN_HOSTS, WITHIN_HOST
from quire.parallel.interface import ProcessGroup
from quire.parallel.torch_dist import NetworkMeeting
from quire.registry import Registry, load_target

GROUPS = Registry(
    "collectives",
    {
        BETWEEN_HOSTS: "quire.parallel.torch_dist:GlooGroup",
        WITHIN_HOST: "quire.parallel.shared_memory:SharedMemoryGroup",
        BETWEEN_DEVICES: "quire.parallel.nccl:NcclGroup",
    },
)


def join_group(name: str, meeting_point: Path | NetworkMeeting, rank: int, size: int) -> ProcessGroup:
    """Group of `size` ranks, when all have joined; each rank calls it at start. name: key of GROUPS, or "module:class"
    of another ProcessGroup. meeting_point: see GlooGroup."""
    make = load_target(name) if ":" in name else GROUPS.load(name)
    group: ProcessGroup = make(meeting_point, rank, size)
    return group
