"""An EngineClient for an engine of another process that several front ends share (quire/engine/shared_engine.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from quire.engine.messages import Answer, Ask, Ended, EngineFailed, EngineOutputs, EngineReady, SessionMessage
from quire.engine.remote_client import RemoteClient
from quire.engine.shared_engine import INBOX, session_address
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError
from quire.logging import get_logger

logger = get_logger(__name__)


class SharedClient(RemoteClient[EngineFailed | Ask | Answer | Ended]):
    """One front end's session."""

    def __init__(self, directory: Path, session: int, state: SharedState) -> None:
        """directory: location of the sockets."""
        wake_reader, self._wake_writer = os.pipe()
        received = EngineReady | EngineOutputs | EngineFailed | Ask | Answer | Ended
        super().__init__(f"ipc://{directory / session_address(session)}", received, wake_reader)
        self._outbox.connect(f"ipc://{directory / INBOX}")
        self._prefix = [str(session).encode()]
        self.session, self.state = session, state
        self.questions = Questions(self.send)
        """Questions to the parent and to other sessions."""
        self._num_ticks = -1

    @property
    def silence(self) -> float:
        self._hear_ticks()
        return self._heartbeat.silence

    @property
    def is_restarting(self) -> bool:
        return self.state.engine.is_restarting

    @property
    def num_restarts(self) -> int:
        return self.state.engine.num_restarts

    def send(self, *messages: SessionMessage) -> None:
        with self._sending:
            self._raise_if_dead()
            self._send(*messages)

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the session; the engine keeps running."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
        os.close(self._wake_writer)
        with self._receiving:
            self._outbox.setsockopt(zmq.LINGER, int(timeout * 1000))
            self._close_sockets()

    def _listen(self, has_message: bool, is_woken: bool) -> bool:
        self._hear_ticks()
        return has_message

    def _note(self, message: EngineFailed | Ask | Answer | Ended) -> None:
        if not isinstance(message, EngineFailed):
            self.questions.hear(message)
            return
        death = message.error()
        assert isinstance(death, EngineDeadError)
        with self._sending:
            self._death = death
        self.questions.hear(death)

    def _hear_ticks(self) -> None:
        """Read the parent's life and the engine's silence from shared memory."""
        num_ticks = self.state.engine.num_ticks
        if num_ticks == self._num_ticks:
            self._heartbeat.look()
        else:
            self._num_ticks = num_ticks
            self._heartbeat.beat(self.state.engine.silence)


class Questions:
    """Questions to services of the parent and to other sessions, and answers to theirs, over the sockets of the
    requests. The parent forwards them without keeping state."""

    def __init__(self, send: Callable[[Ask | Answer], None]) -> None:
        """send: to the parent; raises EngineDeadError."""
        self._send = send
        self._asked: dict[int, tuple[str | int, asyncio.Future[bytes | None]]] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop in which this session asks and answers."""
        self._answer: Callable[[bytes], Awaitable[bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, peer: str | int, payload: bytes) -> bytes | None:
        """Ask a service of the parent or another session; None if it ended or failed. Raises EngineDeadError if the
        engine or the parent is gone."""
        number, self._loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[bytes | None] = self._loop.create_future()
        self._asked[number] = peer, future
        try:
            self._send(Ask(number, peer, payload))
            return await future
        finally:
            del self._asked[number]

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer other sessions' questions in the calling event loop. Only the first call counts."""
        if self._answer is None:
            self._loop, self._answer = asyncio.get_running_loop(), answer

    def hear(self, message: Ask | Answer | Ended | EngineDeadError) -> None:
        """Handle a message of the parent, or the engine's death, in any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Ask | Answer | Ended | EngineDeadError) -> None:
        match message:
            case Ask():
                task = asyncio.ensure_future(self._reply(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Answer(number, _, payload):
                _, future = self._asked.get(number, (None, None))
                if future is not None and not future.done():  # done if the asking task was cancelled
                    future.set_result(payload)
            case _:
                for peer, future in self._asked.values():
                    if isinstance(message, EngineDeadError) and not future.done():
                        future.set_exception(message.again())
                    elif isinstance(message, Ended) and message.session == peer and not future.done():
                        future.set_result(None)

    async def _reply(self, question: Ask) -> None:
        assert self._answer is not None, "questions come after answer_with"
        assert isinstance(question.peer, int)
        payload: bytes | None = None
        try:
            payload = await self._answer(question.payload)
        except Exception:
            logger.exception("a question of another API process was not answered")
        with contextlib.suppress(EngineDeadError):  # the asker gets the same error
            self._send(Answer(question.number, question.peer, payload))
