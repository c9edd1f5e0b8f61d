"""Questions among the processes of a server: a front end asks a service of its parent, or another front end.

They share the sockets of the sessions (quire/engine/shared_client.py) with requests, and have nothing else in common.
The parent passes them on and remembers none of them: an asker hears when the session that it asked has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from quire.engine.messages import Answer, Ask, Ended
from quire.errors import EngineDeadError
from quire.logging import get_logger

logger = get_logger(__name__)


class Questions:
    """What one session asks and answers."""

    def __init__(self, send: Callable[[Ask | Answer], None]) -> None:
        """send: to the parent, from any thread; raises EngineDeadError."""
        self._send = send
        self._asked: dict[int, tuple[str | int, Future[bytes | None]]] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: Callable[[bytes], Awaitable[bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, peer: str | int, payload: bytes) -> bytes | None:
        """What a service of the parent answers, or the front end of another session; None when it has ended or failed.
        Raises EngineDeadError when the engine or the parent is gone."""
        number = next(self._numbers)
        _, future = self._asked[number] = peer, Future[bytes | None]()
        try:
            self._send(Ask(number, peer, payload))
            return await asyncio.wrap_future(future)
        finally:
            self._asked.pop(number, None)

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer what other sessions ask, in the event loop that calls this. The first call counts."""
        if self._answer is None:
            self._loop, self._answer = asyncio.get_running_loop(), answer

    def take(self, message: Ask | Answer | Ended) -> None:
        """From the parent, in any thread."""
        match message:
            case Ask():
                assert self._loop is not None, "questions come after answer_with"
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                    self._loop.call_soon_threadsafe(self._begin, message)
            case Answer(number, _, payload):
                self._settle(number, payload)
            case Ended(session):
                for number, (peer, _) in list(self._asked.items()):
                    if peer == session:
                        self._settle(number, None)

    def fail(self, death: EngineDeadError) -> None:
        """No answers will come."""
        for number in list(self._asked):
            self._settle(number, death.again())

    def _settle(self, number: int, result: bytes | EngineDeadError | None) -> None:
        _, future = self._asked.pop(number, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return  # the task that asked was cancelled
        if isinstance(result, EngineDeadError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _begin(self, question: Ask) -> None:
        task = asyncio.ensure_future(self._reply(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: Ask) -> None:
        assert self._answer is not None
        assert isinstance(question.peer, int)
        payload: bytes | None = None
        try:
            payload = await self._answer(question.payload)
        except Exception:
            logger.exception("a question of another API process was not answered")
        with contextlib.suppress(EngineDeadError):  # then the asker hears of that itself
            self._send(Answer(question.number, question.peer, payload))
