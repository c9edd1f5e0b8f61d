"""Hosts of ranks, and the addresses at which others reach them."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> str:
    """Identity of the memory that processes here can share, to compare between ranks."""
    device = SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.is_dir() else 0
    return f"{BOOT_ID.read_text().strip()} {device}"


def own_address(peer: str) -> str:
    """This host's IP address on the way to `peer`, for NetworkMeeting; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address
