from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping

from quire.engine.messages import Ask, Ended, QuestionAnswer
from quire.errors import EngineDeadError
from quire.logging import get_logger

logger = get_logger(__name__)


class Exchange:
    """Parent process's half of questions between server processes: forwards questions and answers without keeping
    state."""

    def __init__(
        self, services: Mapping[str, Callable[[int, bytes], bytes]], send: Callable[[int, Ask | QuestionAnswer], bool]
    ) -> None:
        """Parent's half. services: its functions by name, called with the asking session. send: sends to a session;
        returns False if it has ended."""
        self._services, self._send = services, send

    def carry(self, session: int, message: Ask | QuestionAnswer) -> None:
        if isinstance(message, QuestionAnswer):
            self._send(message.asker, message)
        elif isinstance(message.peer, str):
            payload = self._serve(message.peer, session, message.payload)
            self._send(session, QuestionAnswer(message.number, session, payload))
        elif not self._send(message.peer, Ask(message.number, session, message.payload)):
            self._send(session, QuestionAnswer(message.number, session, None))

    def _serve(self, service: str, session: int, payload: bytes) -> bytes | None:
        try:
            return self._services[service](session, payload)
        except Exception:
            logger.exception("the service %r failed", service)
            return None


class Questions:
    """Server process's half: asks its own questions, and answers those of other sessions."""

    def __init__(self, send: Callable[[Ask | QuestionAnswer], None]) -> None:
        """Half of a server process. send: to the parent; raises EngineDeadError."""
        self._send = send
        self._asked: dict[int, tuple[str | int, asyncio.Future[bytes | None]]] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop in which this session asks and answers."""
        self._answer: Callable[[bytes], Awaitable[bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, peer: str | int, payload: bytes) -> bytes | None:
        """Ask `peer`, a service of the parent process (by name) or another API process (by number); None if it ended or
        failed. Raises EngineDeadError if the engine or the parent is gone."""
        number, self._loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[bytes | None] = self._loop.create_future()
        self._asked[number] = peer, future
        try:
            self._send(Ask(number, peer, payload))
            return await future
        finally:
            del self._asked[number]

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer questions of the server's other API processes in the calling event loop. Only the first call
        counts."""
        if self._answer is None:
            self._loop, self._answer = asyncio.get_running_loop(), answer

    def hear(self, message: Ask | QuestionAnswer | Ended | EngineDeadError) -> None:
        """Handle a message of the parent or the engine's death; any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Ask | QuestionAnswer | Ended | EngineDeadError) -> None:
        match message:
            case Ask():
                task = asyncio.ensure_future(self._reply(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case QuestionAnswer(number, _, payload):
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
            self._send(QuestionAnswer(question.number, question.peer, payload))
