"""Stored responses of several API processes, which their parent keeps, and the messages that ask for them."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import msgspec

from quire.engine.shared_client import SharedClient
from quire.errors import InternalError
from quire.server.response_store import ResponseRejection, ResponseStore, StoredResponse

SERVICE = "responses"


class _OfResponse(msgspec.Struct):
    owner: str
    response_id: str
    response: StoredResponse


class _PutResponse(_OfResponse, tag="put"): ...


class _Begin(_OfResponse, tag="begin"): ...


class _Finish(_OfResponse, tag="finish"): ...


class _FindResponse(msgspec.Struct, tag="find"):
    owner: str
    response_id: str


class _Remove(msgspec.Struct, tag="remove"):
    owner: str
    response_id: str


_Message = _PutResponse | _Begin | _Finish | _FindResponse | _Remove


class ParentsResponses:
    """Store in the parent process. Raises EngineDeadError if the parent or the engine is gone, InternalError if it
    fails to answer."""

    def __init__(self, client: SharedClient) -> None:
        self._questions = client.questions
        self.maker = client.session

    async def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        await self._ask(_PutResponse(owner, response_id, response))

    async def begin_response(self, owner: str, response_id: str, response: StoredResponse) -> ResponseRejection | None:
        answer = await self._ask(_Begin(owner, response_id, response))
        return msgspec.msgpack.decode(answer, type=ResponseRejection | None)

    async def keep_finished(self, owner: str, response_id: str, response: StoredResponse) -> None:
        await self._ask(_Finish(owner, response_id, response))

    async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
        answer = await self._ask(_FindResponse(owner, response_id))
        return msgspec.msgpack.decode(answer, type=StoredResponse | None)

    async def remove(self, owner: str, response_id: str) -> bool:
        return msgspec.msgpack.decode(await self._ask(_Remove(owner, response_id)), type=bool)

    async def ask(self, maker: int, question: bytes) -> bytes | None:
        return await self._questions.ask(maker, question)

    def answer_with(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._questions.answer_with(answer)

    async def _ask(self, message: _Message) -> bytes:
        answer = await self._questions.ask(SERVICE, msgspec.msgpack.encode(message))
        if answer is None:
            raise InternalError("the parent process failed to answer (its log says more)")
        return answer


class ResponseService:
    """Parent's half: keeps stored responses of all API processes. Several threads call it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._ended: set[int] = set()

    def answer(self, session: int, message: bytes) -> bytes:
        result: StoredResponse | ResponseRejection | bool | None = None
        decoded = msgspec.msgpack.decode(message, type=_Message)
        with self._lock:
            match decoded:
                case _PutResponse(owner, response_id, response):
                    self._store.put(owner, response_id, response)
                case _Begin(owner, response_id, response):
                    if session not in self._ended:  # otherwise nothing would end the response
                        result = self._store.begin_response(owner, response_id, response)
                case _Finish(owner, response_id, response):
                    self._store.keep_finished(owner, response_id, session, response)
                case _FindResponse(owner, response_id):
                    result = self._store.find_response(owner, response_id)
                case _Remove(owner, response_id):
                    result = self._store.remove(owner, response_id)
        return msgspec.msgpack.encode(result)

    def end_session(self, session: int) -> None:
        """Fail the responses that the ended process was making."""
        with self._lock:
            self._ended.add(session)
            self._store.end_maker(session, "the process that was making the response has ended")
