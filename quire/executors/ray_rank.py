"""Actor of one rank, which Ray starts on a node."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.executors.rank import Rank, RankCall, RankEnds
from quire.logging import configure_logging
from quire.parallel.hosts import shared_memory
from quire.utils.heartbeat import Progress

if TYPE_CHECKING:
    from quire.parallel.torch_dist import NetworkMeeting


class RankHost(NamedTuple):
    """Place of an actor. node_id: Ray's. address: reachable from the other nodes. memory: equal for processes that can
    share memory."""

    node_id: str
    address: str
    process_id: int
    memory: str


class RayRank:
    """One rank. Calls are methods with messages, one at a time and in order: Ray queues them. `live` and `beat` answer
    beside them, on threads of their own."""

    def __init__(self) -> None:
        configure_logging()
        self._calls = msgspec.msgpack.Decoder(RankCall)
        self._encode = msgspec.msgpack.Encoder().encode
        self._progress = Progress()
        self._progress.is_idle = True
        self._meeting: NetworkMeeting | None = None
        self._rank: Rank | None = None

    def host(self) -> RankHost:
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return RankHost(node_id, ray.util.get_node_ip_address(), os.getpid(), shared_memory())

    def open_meeting(self, address: str) -> int:
        """First rank only: open and return the port at which all meet."""
        from quire.parallel.torch_dist import NetworkMeeting

        self._meeting = NetworkMeeting.open(address)
        return self._meeting.port

    def begin(self, number: int, own: str, first: str, port: int, collectives: str | None) -> None:
        """Become the rank of this number. own, first: addresses of this rank and the first one. collectives: see
        RankEnds."""
        from quire.parallel.torch_dist import NetworkMeeting

        meeting = self._meeting or NetworkMeeting.at(first, port, own)
        self._rank = Rank(
            number, lambda stage: RankEnds(meeting.of(f"stage {stage}"), collectives=collectives, network=meeting)
        )

    def answer(self, message: bytes) -> bytes:
        """Run an encoded RankCall; returns its encoded RankAnswer."""
        assert self._rank is not None, "begin comes before the first call"
        self._progress.is_idle = False
        self._progress.turn()
        try:
            return self._encode(self._rank.answer(self._rank.begin(self._calls.decode(message))))
        finally:
            self._progress.is_idle = True

    def beat(self) -> int:
        """Progress of this rank as a byte (`Progress`), asked for by the engine."""
        return self._progress.byte()

    def live(self) -> None:
        """Block until the actor ends, so the engine notices its end."""
        threading.Event().wait()
