"""How many files, sockets among them, this process may have open."""

from __future__ import annotations

import sys

NUM_RESERVED = 128
"""For what the process opens besides: the engine's pipes, logs, modules that are imported late."""


def make_room_for_connections(num_wanted: int) -> int:
    """Raise the process's own limit (`ulimit -n`, often 1024) as far as it may be and `num_wanted` connections need.

    Returns how many connections fit, at least 1.
    """
    if sys.platform == "win32":
        return num_wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_wanted + NUM_RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return num_wanted if soft == resource.RLIM_INFINITY else max(1, min(num_wanted, soft - NUM_RESERVED))
