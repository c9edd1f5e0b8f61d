"""What one look at a server shows: the body of `GET /debug/kv`, and of every event of `/debug/kv/events`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.dashboard.recent import Recent
from quire.kv_cache.stats import EngineStats
from quire.scheduler.snapshot import KVSnapshot, RequestView


class Observations(msgspec.Struct):
    """A quantity that was observed `count` times, `sum` in total."""

    sum: float
    count: int


class Frame(msgspec.Struct):
    """Carries no time of day, so that two looks at a server that rests are equal, and one of them need not be sent."""

    version: str
    model: str
    backend: str
    max_model_len: int
    is_draining: bool
    time_to_first_token: Observations
    """Seconds, over all requests so far: the difference of two frames gives the mean between them."""
    stats: EngineStats
    kv: KVSnapshot
    shares: dict[str, float] = {}
    """What follows from `stats`: the shares of `quire.kv_cache.stats.shares`."""
    recent: Recent = Recent()
    task: str = "completion"
    """What the model is for: "chat", "completion" without a chat template, "embed" or "classify"."""


class Owner(msgspec.Struct, frozen=True):
    """One table entry that names a block."""

    request_id: str
    sequence: int
    group: int
    logical: int


def owners_of(kv: KVSnapshot) -> dict[int, list[Owner]]:
    """Physical block -> the table entries that name it, in the order of the requests."""
    owners: dict[int, list[Owner]] = {}
    for owner, block in _entries(kv):
        owners.setdefault(block, []).append(owner)
    return owners


def blocks_of(request: RequestView) -> set[int]:
    """The physical blocks of a request, shared ones included once."""
    return {block for s in request.sequences for table in s.tables for block in table if block}


def number_of(request_id: str) -> int:
    """The number at the end of the engine's key, one for each request: for people, and for picking a colour."""
    _, _, number = request_id.rpartition("#")
    return int(number) if number.isdecimal() else 0


def _entries(kv: KVSnapshot) -> Iterator[tuple[Owner, int]]:
    for request in kv.requests:
        for sequence in request.sequences:
            for group, table in enumerate(sequence.tables):
                for logical, block in enumerate(table):
                    if block:
                        yield Owner(request.request_id, sequence.index, group, logical), block
