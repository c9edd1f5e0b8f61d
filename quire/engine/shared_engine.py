"""One engine for several front ends, each in a process of its own: which of them asked for what, and who hears of it.

A front end's process is a *session* (quire/engine/shared_client.py). The engine itself knows of one client alone, which
is why it may be of any kind, also one that survives its engine.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import zmq

from quire.engine.client import EngineClient, cause_of_death
from quire.engine.long_prompts import take_piece
from quire.engine.messages import (
    Abort,
    AddRequest,
    Answer,
    Ask,
    AskSession,
    Call,
    CallResult,
    ClientMessage,
    EngineDied,
    EngineOutputs,
    EngineReady,
    Question,
    Reply,
    RequestRejected,
    SessionMessage,
)
from quire.engine.shared_state import EngineState
from quire.errors import EngineDeadError, QuireError
from quire.logging import get_logger
from quire.request import EngineRequest
from quire.stats import EngineStats
from quire.utils.runtime_directory import RuntimeDirectory

logger = get_logger(__name__)

INBOX = "front-ends"
"""The socket of the parent."""
STATS_SECONDS = 0.5
"""How often a session without outputs of its own gets a snapshot."""
_STOP = b""


def session_address(number: int) -> str:
    """Name of the socket that carries messages to a session."""
    return f"session-{number}"


@dataclass(slots=True)
class _Request:
    """A request that the engine has. name: the caller's. num_sequences: how many of it are reported."""

    session: int
    name: str
    num_sequences: int
    ended: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, session: int, request: EngineRequest) -> _Request:
        name, mark, _ = request.request_id.rpartition("#")
        params = request.params
        num_sequences = params.n if params.use_beam_search else params.num_sequences
        return cls(session, name if mark else request.request_id, num_sequences)


@dataclass(slots=True, frozen=True)
class _Asked:
    """A question of a session to another one."""

    asker: int
    ask_id: int
    session: int


class SharedEngine:
    """Two threads serve the sessions once `start` is called: one carries messages to the engine, one its outputs."""

    def __init__(
        self,
        client: EngineClient,
        directory: RuntimeDirectory,
        state: EngineState,
        *,
        services: Mapping[str, Callable[[int, bytes], bytes]],
        on_stats: Callable[[EngineStats], None],
        on_change: Callable[[], None],
    ) -> None:
        """directory: of the sockets. services: what answers a session's `Ask`, by name. on_stats: hears of snapshots.
        on_change: is called when the engine is ready and when it has ended. All are called by threads."""
        self._client = client
        self._directory = directory
        self._state = state
        self._services, self._on_stats, self._on_change = services, on_stats, on_change
        self.ready: EngineReady | None = None
        self.failure: QuireError | None = None
        """Why there is no engine: what its start failed with, or how it died."""
        self._lock = threading.Lock()
        """Of everything below, and of sending."""
        self._sessions: dict[int, zmq.Socket[bytes]] = {}
        self._heard: dict[int, float] = {}
        """When a session got its last snapshot."""
        self._requests: dict[str, _Request] = {}
        self._names: set[str] = set()
        self._calls: dict[int, tuple[int, int]] = {}
        """Our id of a call -> session and its id."""
        self._own_calls: dict[int, str] = {}
        self._questions: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._session_numbers = itertools.count(1)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(directory.address(INBOX))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SessionMessage)
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("quire-outputs", self._carry_outputs), ("quire-messages", self._carry_messages))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def open_session(self) -> int:
        """Number of a new session, which no other one has had."""
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        with self._lock:
            number = next(self._session_numbers)
            socket.connect(self._directory.address(session_address(number)))
            self._sessions[number] = socket
            if self.ready is not None:
                self._send(number, self.ready)
        return number

    def close_session(self, number: int) -> None:
        """The process of a session has ended: abort its requests."""
        with self._lock:
            socket = self._sessions.pop(number, None)
            if socket is None:
                return
            socket.close(linger=0)
            self._heard.pop(number, None)
            for request_id in [key for key, request in self._requests.items() if request.session == number]:
                self._forget(request_id)
                self._to_engine(Abort(request_id))
            for key, asked in list(self._questions.items()):
                if number in (asked.session, asked.asker):
                    self._reply(key, None)
            if self.ready is None:
                return
            # It may have been about to change these: the engine knows how far it came.
            for method in ("is_sleeping", "is_paused"):
                call_id = next(self._numbers)
                self._own_calls[call_id] = method
                self._to_engine(Call(call_id, method))

    def tell(self) -> None:
        """Tell all sessions how the engine does, and that this process gets on. To be called several times a second."""
        self._state.silence = self._client.silence
        self._state.is_restarting = self._client.is_restarting
        self._state.num_restarts = self._client.num_restarts
        self._state.num_ticks += 1

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engine, as EngineClient.shutdown, and the threads. Idempotent."""
        if self._context.closed:
            return
        self._client.shutdown(timeout)
        if self._threads[0].ident is not None:
            with self._context.socket(zmq.PUSH) as stop:
                stop.connect(self._directory.address(INBOX))
                stop.send_multipart((_STOP, b""))
                for thread in self._threads:
                    thread.join()
        with self._lock:
            for socket in self._sessions.values():
                socket.close(linger=0)
            self._sessions.clear()
        self._inbox.close(linger=0)
        self._context.term()

    # Threads.

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # a thread that ended in silence would leave every request waiting
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            if self.ready is None and isinstance(error, QuireError):
                self.failure = error
            elif self.failure is None:
                self.failure = cause_of_death(error)
            if isinstance(self.failure, EngineDeadError):
                died = EngineDied(str(self.failure), self.failure.summary, self.failure.error_id)
                for session in self._sessions:
                    self._send(session, died)
        self._on_change()

    def _carry_outputs(self) -> None:
        ready = self._client.ready
        with self._lock:
            self.ready = ready
            for session in self._sessions:
                self._send(session, ready)
        self._on_change()
        while True:
            outputs = self._client.receive()
            if outputs is not None:
                self._route(outputs)

    def _carry_messages(self) -> None:
        while True:
            sender, *payloads = self._inbox.recv_multipart()
            if sender == _STOP:
                return
            messages = [self._decoder.decode(payload) for payload in payloads]
            for message in messages:
                while isinstance(message, AddRequest) and message.pieces:
                    take_piece(message)
            self._take(int(sender), messages)

    # From the sessions.

    def _take(self, session: int, messages: list[SessionMessage]) -> None:
        answers = [Answer(ask.ask_id, self._answer(session, ask)) for ask in messages if isinstance(ask, Ask)]
        with self._lock:
            for answer in answers:
                self._send(session, answer)
            if session not in self._sessions:
                return  # what a process that has ended had still sent
            passed: list[ClientMessage] = []
            for message in messages:
                match message:
                    case AddRequest(request):
                        if self._add(session, request):
                            passed.append(message)
                    case Abort(request_id, index):
                        self._note_end(request_id, index)
                        passed.append(message)
                    case Call(call_id, method, argument):
                        number = next(self._numbers)
                        self._calls[number] = session, call_id
                        passed.append(Call(number, method, argument))
                    case AskSession(ask_id, other, payload):
                        self._pass_question(_Asked(session, ask_id, other), payload)
                    case Reply(number, payload):
                        self._reply(number, payload)
            if passed:
                self._to_engine(*passed)

    def _add(self, session: int, request: EngineRequest) -> bool:
        """Take note of a request, or reject it: another one of this name has not ended."""
        added = _Request.of(session, request)
        if added.name in self._names:
            text = f"request id {added.name!r} is already in use"
            rejected = RequestRejected(request.request_id, text, "request_id")
            self._send(session, EngineOutputs(rejections=[rejected]))
            return False
        self._names.add(added.name)
        self._requests[request.request_id] = added
        return True

    def _pass_question(self, asked: _Asked, payload: bytes) -> None:
        number = next(self._numbers)
        self._questions[number] = asked
        if asked.session in self._sessions:
            self._send(asked.session, Question(number, payload))
        else:
            self._reply(number, None)

    def _reply(self, number: int, payload: bytes | None) -> None:
        asked = self._questions.pop(number, None)
        if asked is not None:
            self._send(asked.asker, Answer(asked.ask_id, payload))

    def _answer(self, session: int, ask: Ask) -> bytes | None:
        try:
            return self._services[ask.service](session, ask.payload)
        except Exception:
            logger.exception("the service %r failed", ask.service)
            return None

    def _to_engine(self, *messages: ClientMessage) -> None:
        with contextlib.suppress(EngineDeadError):  # the thread that carries outputs tells all sessions
            self._client.send(*messages)

    # To the sessions.

    def _route(self, outputs: EngineOutputs) -> None:
        with self._lock:
            parts: dict[int, EngineOutputs] = {}
            for update in outputs.updates:
                request = self._requests.get(update.request_id)
                if request is not None:
                    if update.finish_reason is not None:
                        self._note_end(update.request_id, update.index)
                    _part(parts, request.session).updates.append(update)
            for rejected in outputs.rejections:
                request = self._forget(rejected.request_id)
                if request is not None:
                    _part(parts, request.session).rejections.append(rejected)
            for result in outputs.results:
                self._route_result(parts, result)
            if outputs.stats is not None:
                self._state.num_running = outputs.stats.num_running
                self._on_stats(outputs.stats)
                self._add_stats(parts, outputs.stats)
            for session, part in parts.items():
                self._send(session, part)

    def _route_result(self, parts: dict[int, EngineOutputs], result: CallResult) -> None:
        method = self._own_calls.pop(result.call_id, None)
        if method is not None:
            self._note_state(method, result.value)
        session, call_id = self._calls.pop(result.call_id, (0, 0))
        if session:
            result.call_id = call_id
            _part(parts, session).results.append(result)

    def _add_stats(self, parts: dict[int, EngineOutputs], stats: EngineStats) -> None:
        now = time.monotonic()
        for session in self._sessions:
            if session in parts or now - self._heard.get(session, 0.0) >= STATS_SECONDS:
                self._heard[session] = now
                _part(parts, session).stats = stats

    def _note_state(self, method: str, value: object) -> None:
        if method == "is_paused":
            self._state.pauses, self._state.refuses_new = bool(value), value == 1
        else:
            self._state.is_asleep = bool(value)
            self._state.sleep_level = self._state.sleep_level if value else 0

    def _note_end(self, request_id: str, index: int | None) -> None:
        """A sequence of a request, or all of it, is over."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if index is not None:
            request.ended.add(index)
        if index is None or len(request.ended) == request.num_sequences:
            self._forget(request_id)

    def _forget(self, request_id: str) -> _Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._names.discard(request.name)
        return request

    def _send(self, session: int, message: EngineReady | EngineOutputs | EngineDied | Answer | Question) -> None:
        socket = self._sessions.get(session)
        if socket is not None:
            socket.send(self._encoder.encode(message), zmq.NOBLOCK)


def _part(parts: dict[int, EngineOutputs], session: int) -> EngineOutputs:
    """What a session is told."""
    found = parts.get(session)
    if found is None:
        found = parts[session] = EngineOutputs()
    return found
