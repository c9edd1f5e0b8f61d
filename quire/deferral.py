"""The wait of one request that a gate keeps from starting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

PENDING_PREFIX = "pending prefix"
"""The reason of a deferral while a running sequence computes blocks of the request's prompt."""


class Deferral(NamedTuple):
    """Why a waiting request may not start yet, as a gate decided it (quire/scheduler/gates.py)."""

    reason: str
    """The gate's `reason`."""
    reserved_blocks: int
    """Blocks of the pool that are reserved for the request meanwhile."""
    is_pending: Callable[[], bool]
    """Whether the awaited event is still to come. Constant time: the scheduler asks in every pass."""
    deadline: float = math.inf
    """When the request goes on without the event."""
    cancel: Callable[[], object] = lambda: None
    """Ends the work that the gate began for the request. Called once, when the deferral ends for any reason."""
    reserves_slots: bool = True
    """Whether the request's slots are reserved meanwhile. Not for an event outside the engine, which may take seconds:
    the engine would idle when as many requests wait as it has slots."""
