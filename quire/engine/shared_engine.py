"""One fleet for several front-end processes (sessions, quire/engine/shared_client.py): the sockets between them. The
ledger knows each request's session; engines do not."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq

from quire.engine.client import cause_of_death
from quire.engine.fleet import Fleet, Parts
from quire.engine.long_prompts import take_piece
from quire.engine.messages import (
    AddRequest,
    Ask,
    Call,
    Ended,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    QuestionAnswer,
    SessionMessage,
)
from quire.engine.questions import Exchange
from quire.engine.remote_client import pull_socket, push_socket
from quire.engine.shared_state import EngineState
from quire.errors import EngineDeadError, QuireError
from quire.kv_cache.stats import EngineStats
from quire.utils.runtime_directory import RuntimeDirectory

INBOX, SESSION = "front-ends", "session-{}"
"""Names of the sockets of the parent and of a session."""
PARENT = 0
"""Session number of the parent process's own calls."""
OWN_CALLS = ("is_sleeping", "is_paused")
"""Methods of the parent's calls; the index is the call's id."""
STATS_SECONDS = 0.5
"""Seconds between two snapshots to a session without outputs."""
_STOP = b""


class SharedEngine:
    """Parent's side of an engine that several server processes share. After `start`, two threads serve the sessions:
    one carries messages to the fleet, one its outputs."""

    def __init__(
        self,
        fleet: Fleet,
        directory: RuntimeDirectory,
        state: EngineState,
        *,
        services: Mapping[str, Callable[[int, bytes], bytes]],
        on_stats: Callable[[EngineStats], None],
        on_change: Callable[[], None],
    ) -> None:
        """Engine shared by server processes. directory: location of the sockets. services: see Exchange. on_stats: gets
        each snapshot. on_change: called when the engine is ready and when it has ended. The last three run on this
        class's threads."""
        self._fleet = fleet
        self._directory = directory
        self._state = state
        self._on_stats, self._on_change = on_stats, on_change
        self.ready: EngineReady | None = None
        self.failure: QuireError | None = None
        """Error of a failed start, or the engine's death."""
        self._lock = threading.RLock()
        """Guards everything below, and sending."""
        self._sessions: dict[int, zmq.Socket[bytes]] = {}
        self._heard: dict[int, float] = {}
        """Time at which each session was last sent a snapshot."""
        self._numbers = itertools.count(1)
        self._exchange = Exchange(services, self._send)
        self._context = zmq.Context()
        self._inbox = pull_socket(self._context, directory.address(INBOX))
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
        with self._lock:
            number = next(self._numbers)
            self._sessions[number] = push_socket(self._context, self._directory.address(SESSION.format(number)))
            if self.ready is not None:
                self._send(number, self.ready)
        return number

    def close_session(self, number: int) -> None:
        """Abort the requests of an ended session."""
        with self._lock:
            socket = self._sessions.pop(number, None)
            if socket is None:
                return
            socket.close(linger=0)
            self._heard.pop(number, None)
            with contextlib.suppress(QuireError):  # the thread that carries outputs tells all sessions
                self._fleet.close_session(number)
                # The ended session may have changed these states: ask the engine for them.
                self._fleet.submit(PARENT, *(Call(number, method) for number, method in enumerate(OWN_CALLS)))
            for session in self._sessions:
                self._send(session, Ended(number))

    def tell(self) -> None:
        """Publish the engine's state and this process's progress. Call several times a second."""
        self._state.silence, stopped = self._fleet.silence, self._fleet.stopped
        self._state.stopped_code = 0 if stopped is None else stopped + 2
        self._state.is_restarting = self._fleet.is_restarting
        self._state.num_restarts = self._fleet.num_restarts
        self._state.num_ticks += 1

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engine and the threads. Idempotent."""
        if self._context.closed:
            return
        self._fleet.shutdown(timeout)
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
                failure = self.failure
                died = EngineFailed(str(failure), summary=failure.summary, error_id=failure.error_id)
                for session in self._sessions:
                    self._send(session, died)
        self._on_change()

    def _carry_outputs(self) -> None:
        ready = self._fleet.ready
        with self._lock:
            self.ready = ready
            for session in self._sessions:
                self._send(session, ready)
        self._on_change()
        while True:
            parts = self._fleet.receive_parts()
            if parts is not None:
                self._route(parts)

    def _carry_messages(self) -> None:
        while True:
            sender, *payloads = self._inbox.recv_multipart()
            if sender == _STOP:
                return
            session, for_fleet = int(sender), []
            for message in map(self._decoder.decode, payloads):
                match message:
                    case Ask() | QuestionAnswer():
                        self._exchange.carry(session, message)
                    case _:
                        while isinstance(message, AddRequest) and message.pieces:
                            take_piece(message)
                        for_fleet.append(message)
            with self._lock:
                if for_fleet and session in self._sessions:  # its process may have ended
                    with contextlib.suppress(EngineDeadError):  # the thread that carries outputs tells all sessions
                        rejections = self._fleet.submit(session, *for_fleet)
                        if rejections:
                            self._send(session, EngineOutputs(rejections=rejections))

    def _route(self, parts: Parts) -> None:
        own = parts.pop(PARENT, None) or EngineOutputs()
        with self._lock:
            for result in own.results:
                if OWN_CALLS[result.call_id] == "is_paused":
                    self._state.pauses, self._state.refuses_new = bool(result.value), result.value == 1
                else:
                    self._state.is_asleep = bool(result.value)
                    self._state.sleep_level = self._state.sleep_level if result.value else 0
            if own.stats is not None:
                self._state.num_running = own.stats.num_running
                self._state.num_running_live = own.stats.num_running - own.stats.num_running_in_background
                self._on_stats(own.stats)
                now = time.monotonic()
                for session in self._sessions:
                    if session in parts or now - self._heard.get(session, 0.0) >= STATS_SECONDS:
                        self._heard[session] = now
                        parts[session].stats = own.stats
            for session, part in parts.items():
                self._send(session, part)

    def _send(
        self, session: int, message: EngineReady | EngineOutputs | EngineFailed | Ask | QuestionAnswer | Ended
    ) -> bool:
        with self._lock:
            socket = self._sessions.get(session)
            if socket is not None:
                socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            return socket is not None
