"""Questions among the processes of a server: a front end asks a service of its parent, or another front end.

They share the sockets of the sessions (quire/engine/shared_client.py) with requests, and have nothing else in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future

from quire.engine.messages import Answer, Ask, Question
from quire.errors import EngineDeadError
from quire.logging import get_logger

logger = get_logger(__name__)


class Switchboard:
    """The parent's half. `take` is called by one thread."""

    def __init__(
        self, services: Mapping[str, Callable[[int, bytes], bytes]], send: Callable[[int, Question | Answer], bool]
    ) -> None:
        """services: what answers the questions to the parent, by name. send: to a session, from any thread; returns
        whether it is there."""
        self._services, self._send = services, send
        self._open: dict[int, tuple[int, int, int]] = {}
        """Number of a question -> session that asks, its number of it, and session that is asked."""
        self._numbers = itertools.count(1)

    def take(self, session: int, message: Ask | Answer) -> None:
        """From a session."""
        match message:
            case Ask(number, str() as service, payload):
                self._send(session, Answer(number, self._serve(service, session, payload)))
            case Ask(number, int() as asked, payload):
                question = Question(next(self._numbers), payload)
                self._open[question.number] = session, number, asked
                if not self._send(asked, question):
                    self._reply(question.number, None)
            case Answer(number, payload):
                self._reply(number, payload)

    def end_session(self, session: int) -> None:
        """Answer None where the session was asked."""
        for number, (asker, _, asked) in list(self._open.items()):
            if session in (asker, asked):
                self._reply(number, None)

    def _reply(self, number: int, payload: bytes | None) -> None:
        opened = self._open.pop(number, None)
        if opened is not None:
            self._send(opened[0], Answer(opened[1], payload))

    def _serve(self, service: str, session: int, payload: bytes) -> bytes | None:
        try:
            return self._services[service](session, payload)
        except Exception:
            logger.exception("the service %r failed", service)
            return None


class Questions:
    """A session's half."""

    def __init__(self, send: Callable[[Ask | Answer], None]) -> None:
        """send: to the parent, from any thread; raises EngineDeadError."""
        self._send = send
        self._asked: dict[int, Future[bytes | None]] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: Callable[[bytes], Awaitable[bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, to: str | int, payload: bytes) -> bytes | None:
        """What a service of the parent answers, or the front end of another session; None when it has ended or failed.
        Raises EngineDeadError when the engine or the parent is gone."""
        number = next(self._numbers)
        future = self._asked[number] = Future()
        try:
            self._send(Ask(number, to, payload))
            return await asyncio.wrap_future(future)
        finally:
            self._asked.pop(number, None)

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer what other sessions ask, in the event loop that calls this. The first call counts."""
        if self._answer is None:
            self._loop, self._answer = asyncio.get_running_loop(), answer

    def take(self, message: Question | Answer) -> None:
        """From the parent, in any thread."""
        if isinstance(message, Question):
            assert self._loop is not None, "questions come after answer_with"
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                self._loop.call_soon_threadsafe(self._begin, message)
            return
        future = self._asked.pop(message.number, None)
        if future is not None and future.set_running_or_notify_cancel():  # else the task that asked was cancelled
            future.set_result(message.payload)

    def fail(self, death: EngineDeadError) -> None:
        """No answers will come."""
        for number in list(self._asked):
            future = self._asked.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(death.again())

    def _begin(self, question: Question) -> None:
        task = asyncio.ensure_future(self._reply(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: Question) -> None:
        assert self._answer is not None
        payload: bytes | None = None
        try:
            payload = await self._answer(question.payload)
        except Exception:
            logger.exception("a question of another API process was not answered")
        with contextlib.suppress(EngineDeadError):  # then the asker hears of that itself
            self._send(Answer(question.number, payload))
