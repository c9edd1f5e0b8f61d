"""Snapshot of a server: body of `GET /debug/kv` and of each event of `/debug/kv/events`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.dashboard.recent import Recent
from quire.kv_cache.stats import EngineStats
from quire.scheduler.snapshot import KVSnapshot, RequestView


class Observations(msgspec.Struct):
    """Sum of a quantity and number of its observations, since the server's start."""

    sum: float
    count: int


class Frame(msgspec.Struct):
    """Snapshot of a server for viewers. It has no time of day, so frames of an idle server are equal."""

    version: str
    model: str
    backend: str
    max_model_len: int
    is_draining: bool
    time_to_first_token: Observations
    """Seconds over all requests so far; two frames give the mean between them."""
    stats: EngineStats
    kv: KVSnapshot
    shares: dict[str, float] = {}
    """Shares computed from `stats` by `quire.kv_cache.stats.shares`."""
    recent: Recent = Recent()
    outcomes: dict[str, int] = {}
    """Sequences finished and requests refused so far, by reason."""
    num_client_errors: int = 0
    """Requests answered with a status of 400 to 499."""
    num_server_errors: int = 0
    """Requests answered with a status of 500 to 599."""
    task: str = "completion"
    """Task of the model: "chat", "completion" without a chat template, "embed" or "classify"."""


class Owner(msgspec.Struct, frozen=True):
    """Block-table entry that names a physical block, for the live page and `quire top`: request, sequence, KV group,
    logical block."""

    request_id: str
    sequence: int
    group: int
    logical: int


def owners_of(kv: KVSnapshot) -> dict[int, list[Owner]]:
    """Block number -> block-table entries that name it, in order of the requests."""
    owners: dict[int, list[Owner]] = {}
    for owner, block in _entries(kv):
        owners.setdefault(block, []).append(owner)
    return owners


def blocks_of(request: RequestView) -> set[int]:
    return {block for s in request.sequences for table in s.tables for block in table if block}


def number_of(request_id: str) -> int:
    """Number at the end of the engine's request key; unique, used for display and colours."""
    _, _, number = request_id.rpartition("#")
    return int(number) if number.isdecimal() else 0


def _entries(kv: KVSnapshot) -> Iterator[tuple[Owner, int]]:
    for request in kv.requests:
        for sequence in request.sequences:
            for group, table in enumerate(sequence.tables):
                for logical, block in enumerate(table):
                    if block:
                        yield Owner(request.request_id, sequence.index, group, logical), block
