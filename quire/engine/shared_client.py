"""An EngineClient whose engine is another process's, which several front ends share (quire/engine/shared_engine.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import zmq

from quire.engine.long_prompts import encode_message, send_parts
from quire.engine.messages import (
    Answer,
    Ask,
    AskSession,
    ClientMessage,
    EngineDied,
    EngineOutputs,
    EngineReady,
    Question,
    Reply,
    SessionMessage,
)
from quire.engine.shared_engine import INBOX, session_address
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError, InternalError
from quire.logging import get_logger
from quire.utils.heartbeat import BEAT_SECONDS, Heartbeat

Received = EngineReady | EngineOutputs | EngineDied | Answer | Question

logger = get_logger(__name__)


class SharedClient:
    """One session."""

    def __init__(self, directory: Path, session: int, state: SharedState) -> None:
        """directory: of the sockets."""
        self.session = session
        self.state = state
        self._sender = str(session).encode()
        self._ready: EngineReady | None = None
        self._death: EngineDeadError | None = None
        self._is_closed = False
        self._asked: dict[int, Future[bytes | None]] = {}
        self._answering: _Answering | None = None
        self._ask_numbers = itertools.count(1)
        self._num_ticks = -1
        self._heartbeat = Heartbeat()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._starting = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Received)
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.connect(f"ipc://{directory / INBOX}")
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(f"ipc://{directory / session_address(session)}")
        self._wake_reader, self._wake_writer = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    @property
    def ready(self) -> EngineReady:
        # A lock of its own: a caller of `ready` must not queue behind a `receive` that waits for outputs.
        with self._starting:
            while self._ready is None:
                with self._receiving:
                    message = self._poll(None)
                if isinstance(message, EngineReady):
                    self._ready = message
            return self._ready

    @property
    def silence(self) -> float:
        self._listen()
        return self._heartbeat.silence

    @property
    def is_restarting(self) -> bool:
        return self.state.engine.is_restarting

    @property
    def num_restarts(self) -> int:
        return self.state.engine.num_restarts

    def send(self, *messages: ClientMessage) -> None:
        self._send(*messages)

    async def ask(self, service: str, payload: bytes) -> bytes:
        """What a service of the parent answers. Raises EngineDeadError when the engine or the parent is gone, and
        InternalError when the service fails."""
        answer = await self._ask(Ask(next(self._ask_numbers), service, payload))
        if answer is None:
            raise InternalError("the parent process failed to answer (its log says more)")
        return answer

    async def ask_session(self, session: int, payload: bytes) -> bytes | None:
        """What the front end of another session answers, with what it gave to `answer_questions`; None when it has
        ended or failed to. Raises EngineDeadError when the engine or the parent is gone."""
        return await self._ask(AskSession(next(self._ask_numbers), session, payload))

    async def _ask(self, message: Ask | AskSession) -> bytes | None:
        future = self._asked[message.ask_id] = Future()
        try:
            self._send(message)
            return await asyncio.wrap_future(future)
        finally:
            self._asked.pop(message.ask_id, None)

    def answer_questions(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer what other sessions ask, in the event loop that calls this. The first call counts."""
        self._answering = self._answering or _Answering(asyncio.get_running_loop(), answer, self._send)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        _ = self.ready
        with self._receiving:
            message = self._poll(timeout)
        assert not isinstance(message, EngineReady)
        return message

    def shutdown(self, timeout: float = 5.0) -> None:
        """Leave the session. The engine goes on."""
        with self._sending:
            if self._is_closed:
                return
            self._is_closed = True
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
        os.write(self._wake_writer, b"\0")
        with self._receiving:
            self._inbox.close(linger=0)
            self._outbox.close(linger=int(timeout * 1000))
            self._context.term()
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _send(self, *messages: SessionMessage) -> None:
        with self._sending:
            self._raise_if_dead()
            parts = [encode_message(self._encoder, message) for message in messages]
            send_parts(self._outbox, [self._sender, *parts])

    def _poll(self, timeout: float | None) -> EngineReady | EngineOutputs | None:
        """The next message for the front end; None when time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_if_dead()
            remaining = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - time.monotonic())
            events = dict(self._poller.poll(int(max(0.0, remaining) * 1000)))
            self._listen()
            if self._inbox in events:
                message = self._decoder.decode(self._inbox.recv())
                if isinstance(message, EngineReady | EngineOutputs):
                    return message
                self._note(message)
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    def _note(self, message: EngineDied | Answer | Question) -> None:
        if isinstance(message, Question):
            assert self._answering is not None, "questions come after answer_questions"
            self._answering.begin(message)
            return
        if isinstance(message, Answer):
            future = self._asked.pop(message.ask_id, None)
            if future is not None and future.set_running_or_notify_cancel():  # else the task that asked was cancelled
                future.set_result(message.payload)
            return
        with self._sending:
            self._death = EngineDeadError(message.message, summary=message.summary, error_id=message.error_id)
            asked, self._asked = self._asked, {}
        for future in asked.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._death.again())

    def _listen(self) -> None:
        """Take note of what the parent says of the engine's silence, or that it says nothing."""
        num_ticks = self.state.engine.num_ticks
        if num_ticks == self._num_ticks:
            self._heartbeat.look()
        else:
            self._num_ticks = num_ticks
            self._heartbeat.beat(self.state.engine.silence)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death.again()


class _Answering:
    """Answers questions in tasks of an event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[bytes], Awaitable[bytes]],
        send: Callable[[Reply], None],
    ) -> None:
        self._loop, self._answer, self._send = loop, answer, send
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, question: Question) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self._start, question)

    def _start(self, question: Question) -> None:
        task = self._loop.create_task(self._reply(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: Question) -> None:
        payload: bytes | None = None
        try:
            payload = await self._answer(question.payload)
        except Exception:
            logger.exception("a question of another API process was not answered")
        with contextlib.suppress(EngineDeadError):  # then the asker hears of that itself
            self._send(Reply(question.number, payload))
