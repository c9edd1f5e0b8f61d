"""An EngineClient over several: replicas of one engine, each with a part of the requests.

A router chooses the replica of each request. A thread for each replica receives what it tells. When a replica ends, its
requests fail, and the others go on.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.engine.client import EngineClient
from quire.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallResult,
    ClientMessage,
    EngineOutputs,
    EngineReady,
    RequestRejected,
    Shutdown,
)
from quire.engine.router import make_router
from quire.errors import EngineDeadError, QuireError
from quire.request import EngineRequest
from quire.stats import EngineStats, add_up
from quire.utils.failures import explain

PREFIX_TOKENS = 64
"""For the router, requests begin alike when this number of their first tokens are the same."""

COMBINE: dict[str, Callable[[Sequence[int]], int]] = {
    "check": max,
    "reset_prefix_cache": sum,
    "sleep": max,
    "wake_up": max,
    "is_sleeping": max,
    "pause": max,
    "resume": max,
    "is_paused": max,
    "abort_all": sum,
}
"""How the replicas' answers to a call become one; `stats` adds up. A call of one replica's state is not here."""


@dataclass
class _LiveRequest:
    """A request and its replica. num_unfinished: sequences whose end has not been reported."""

    replica: int
    num_unfinished: int


@dataclass
class _OpenCall:
    """A call and the replicas that have not answered it."""

    method: str
    waiting: set[int]
    results: list[CallResult] = field(default_factory=list)


class ReplicatedClient:
    """Implements `EngineClient`. The replicas have one configuration; they may be in this process or in others."""

    def __init__(self, clients: Sequence[EngineClient], router: str = "prefix-aware") -> None:
        """Takes over the clients: they are shut down with this one. Raises UserError for an unknown router."""
        self._clients = list(clients)
        self._router_name = router
        self._lock = threading.RLock()
        """Of everything below but the queue."""
        self._living = list(range(len(clients)))
        self._router = make_router(router, len(clients))
        self._requests: dict[str, _LiveRequest] = {}
        self._prefixes: dict[str, int] = {}
        """Registered prefix -> its replica."""
        self._calls: dict[int, _OpenCall] = {}
        self._stats: dict[int, EngineStats] = {}
        """The last snapshot of each living replica."""
        self._death: QuireError | None = None
        self._arrived: queue.SimpleQueue[tuple[int | None, EngineOutputs | BaseException]] = queue.SimpleQueue()
        for number, client in enumerate(self._clients):
            name = f"quire-replica-{number}"
            threading.Thread(target=_receive, args=(client, number, self._arrived), name=name, daemon=True).start()

    @property
    def ready(self) -> EngineReady:
        """Of all replicas together: their blocks, and the longest phases of their starts."""
        each = [client.ready for client in self._clients]
        return EngineReady(
            max_model_len=min(ready.max_model_len for ready in each),
            num_blocks=sum(ready.num_blocks for ready in each),
            block_size=each[0].block_size,
            seconds={phase: max(ready.seconds[phase] for ready in each) for phase in each[0].seconds},
            backend=f"{each[0].backend}, {len(each)} replicas",
            max_concurrency=sum(ready.max_concurrency for ready in each),
        )

    @property
    def silence(self) -> float:
        """The longest of a living replica."""
        with self._lock:
            return max((self._clients[number].silence for number in self._living), default=0.0)

    @property
    def is_restarting(self) -> bool:
        return False

    @property
    def num_restarts(self) -> int:
        return 0

    def send(self, *messages: ClientMessage) -> None:
        with self._lock:
            for message in messages:
                if self._death is not None:
                    raise _again(self._death)
                match message:
                    case AddRequest(request):
                        self._add(request, message)
                    case Abort(request_id, index):
                        self._abort(request_id, index, message)
                    case Call():
                        self._call(message)
                    case Shutdown():
                        for number in list(self._living):
                            self._deliver(number, message)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._death is not None:
                    raise _again(self._death)
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                number, arrived = self._arrived.get(timeout=remaining)
            except queue.Empty:
                return None
            with self._lock:
                if number is not None and isinstance(arrived, BaseException):
                    self._lose(number, arrived)
                elif isinstance(arrived, EngineOutputs):
                    return arrived if number is None else self._take(number, arrived)

    def shutdown(self, timeout: float = 5.0) -> None:
        with self._lock:
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
        deadline = time.monotonic() + timeout
        for client in self._clients:
            client.shutdown(max(0.0, deadline - time.monotonic()))
        self._arrived.put((None, self._death))  # wakes a thread that waits in `receive`

    def _add(self, request: EngineRequest, message: AddRequest) -> None:
        params = request.params
        num_sequences = params.n if params.use_beam_search else params.num_sequences
        while self._living:
            counts = dict.fromkeys(self._living, 0)
            for live in self._requests.values():
                counts[live.replica] += 1
            self._router.learn(list(counts.values()))
            number = self._living[self._router.choose(_prefix(request))]
            self._requests[request.request_id] = _LiveRequest(number, num_sequences)
            if self._deliver(number, message):
                if request.register_prefix:
                    self._prefixes[request.request_id] = number
                return
        raise _again(self._death or EngineDeadError("every replica has ended"))

    def _abort(self, request_id: str, index: int | None, message: Abort) -> None:
        live = self._requests.get(request_id)
        if live is None:
            return
        if index is None:
            del self._requests[request_id]
        else:
            self._end_sequence(request_id)
        self._deliver(live.replica, message)

    def _call(self, call: Call) -> None:
        if call.method == "unregister_prefix" and call.argument in self._prefixes:
            numbers = [self._prefixes.pop(call.argument)]
        elif call.method == "stats" or call.method in COMBINE:
            numbers = list(self._living)
        else:
            error = f"{call.method!r} is of one engine, and this one has {len(self._clients)} replicas"
            if call.method == "unregister_prefix":
                error = f"no prefix {call.argument!r} is registered"
            self._arrived.put((None, EngineOutputs(results=[CallResult(call.call_id, error=error)])))
            return
        self._calls[call.call_id] = _OpenCall(call.method, set(numbers))
        for number in numbers:
            self._deliver(number, call)

    def _deliver(self, number: int, message: ClientMessage) -> bool:
        """Send to one replica; returns False, having noted its end, when it is gone."""
        try:
            self._clients[number].send(message)
        except EngineDeadError as error:
            if isinstance(message, AddRequest):
                self._requests.pop(message.request.request_id)  # another replica takes it
            self._lose(number, error)
            return False
        return True

    def _take(self, number: int, outputs: EngineOutputs) -> EngineOutputs:
        """What a replica tells, as one engine tells it."""
        updates = []
        for update in outputs.updates:
            live = self._requests.get(update.request_id)
            if live is not None and live.replica == number:  # else it was aborted, or failed with its replica
                updates.append(update)
                if update.finish_reason is not None:
                    self._end_sequence(update.request_id)
        for rejected in outputs.rejections:
            self._requests.pop(rejected.request_id, None)
            self._prefixes.pop(rejected.request_id, None)
        results = [combined for result in outputs.results if (combined := self._answer(number, result)) is not None]
        if outputs.stats is not None and number in self._living:
            self._stats[number] = outputs.stats
        stats = add_up(list(self._stats.values())) if self._stats else None
        return EngineOutputs(updates=updates, stats=stats, results=results, rejections=outputs.rejections)

    def _end_sequence(self, request_id: str) -> None:
        live = self._requests[request_id]
        live.num_unfinished -= 1
        if live.num_unfinished <= 0:
            del self._requests[request_id]

    def _answer(self, number: int, result: CallResult | None, call_id: int = 0) -> CallResult | None:
        """Note a replica's answer to a call (None: it has ended); the combined one, when it was the last."""
        call_id = call_id if result is None else result.call_id
        call = self._calls.get(call_id)
        if call is None or number not in call.waiting:
            return None
        call.waiting.discard(number)
        if result is not None:
            call.results.append(result)
        if call.waiting:
            return None
        del self._calls[call_id]
        return _combined(call_id, call)

    def _lose(self, number: int, cause: BaseException) -> None:
        """A replica has ended: fail its requests, and go on without it. Without any, fail everything."""
        if number not in self._living:
            return
        self._living.remove(number)
        self._stats.pop(number, None)
        if not self._living or not isinstance(cause, EngineDeadError):
            self._death = cause if isinstance(cause, QuireError) else EngineDeadError(f"a replica: {explain(cause)}")
            self._arrived.put((None, self._death))
            return
        self._router = make_router(self._router_name, len(self._living))
        self._prefixes = {name: owner for name, owner in self._prefixes.items() if owner != number}
        lost = [request_id for request_id, live in self._requests.items() if live.replica == number]
        for request_id in lost:
            del self._requests[request_id]
        message = f"replica {number} has ended: {cause}"
        rejections = [RequestRejected(request_id, message, is_dead=True) for request_id in lost]
        answers = [self._answer(number, None, call_id) for call_id in list(self._calls)]
        results = [answer for answer in answers if answer is not None]
        self._arrived.put((None, EngineOutputs(rejections=rejections, results=results)))


def _receive(
    client: EngineClient, number: int, arrived: queue.SimpleQueue[tuple[int | None, EngineOutputs | BaseException]]
) -> None:
    """Body of a replica's thread."""
    while True:
        try:
            outputs = client.receive()
        except BaseException as error:  # whatever it is, the replica is lost, and its requests must be told
            arrived.put((number, error))
            client.shutdown()
            return
        if outputs is not None:
            arrived.put((number, outputs))


def _combined(call_id: int, call: _OpenCall) -> CallResult:
    """One answer for all; the first error counts."""
    for result in call.results:
        if result.error is not None:
            return result
    if not call.results:
        return CallResult(call_id, error=f"the replica that {call.method!r} was for has ended", is_internal=True)
    values = [result.value for result in call.results]
    snapshots = [value for value in values if isinstance(value, EngineStats)]
    if snapshots:
        return CallResult(call_id, add_up(snapshots))
    combine = COMBINE.get(call.method, max)
    return CallResult(call_id, combine([value for value in values if isinstance(value, int)]))


def _prefix(request: EngineRequest) -> str | None:
    """What the request begins with, for the router."""
    first = request.prompt_token_ids[:PREFIX_TOKENS]
    if len(first) < PREFIX_TOKENS:
        return None
    return hashlib.blake2b(msgspec.msgpack.encode((request.cache_salt, first)), digest_size=16).hexdigest()


def _again(error: QuireError) -> QuireError:
    return error.again() if isinstance(error, EngineDeadError) else error
