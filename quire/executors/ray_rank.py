"""The actor of one rank: runs an executor of its own, in a process that Ray starts on one of its nodes."""

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
    """Where an actor runs. node_id: Ray's. address: which the other nodes reach. memory: equal for processes that can
    share memory."""

    node_id: str
    address: str
    process_id: int
    memory: str


class RayRank:
    """One rank. Calls are methods with messages, in order, one at a time: Ray keeps those that wait. `live` and `beat`
    answer beside them, on threads of their own."""

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
        """The first rank's: the port at which all meet."""
        from quire.parallel.torch_dist import NetworkMeeting

        self._meeting = NetworkMeeting.open(address)
        return self._meeting.port

    def begin(self, number: int, own: str, first: str, port: int, collectives: str | None) -> None:
        """Be a rank of this number. own, first: this rank's address and the first one's. collectives: as RankEnds has
        it."""
        from quire.parallel.torch_dist import NetworkMeeting

        meeting = self._meeting or NetworkMeeting.at(first, port, own)
        self._rank = Rank(number, lambda stage: RankEnds(meeting, collectives=collectives))

    def answer(self, message: bytes) -> bytes:
        """A RankCall; its RankAnswer."""
        assert self._rank is not None, "begin comes before the first call"
        self._progress.is_idle = False
        self._progress.turn()
        try:
            return self._encode(self._rank.answer(self._rank.begin(self._calls.decode(message))))
        finally:
            self._progress.is_idle = True

    def beat(self) -> int:
        """A byte of Progress."""
        return self._progress.byte()

    def live(self) -> None:
        """Return never: how Ray tells that the actor has ended."""
        threading.Event().wait()
