from __future__ import annotations

import sys

from quire.logging import get_logger

logger = get_logger(__name__)

NUM_RESERVED = 128
"""Files for other uses: the engine's pipes, logs, late imports."""


def make_room_for_connections(num_wanted: int) -> int:
    """Raise the process's limit (`ulimit -n`, often 1024) as far as allowed and needed for `num_wanted` connections.
    Returns how many fit, at least 1; logs a limit that allows fewer."""
    if sys.platform == "win32":
        return num_wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_wanted + NUM_RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft - NUM_RESERVED >= num_wanted:
        return num_wanted
    num_fitting = max(1, soft - NUM_RESERVED)
    logger.warning(
        "%d connections fit, not %d: this process may open %d files (ulimit -Hn), and needs %d for other things",
        num_fitting,
        num_wanted,
        soft,
        NUM_RESERVED,
    )
    return num_fitting
