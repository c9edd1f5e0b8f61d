from __future__ import annotations

import asyncio
import hashlib

import msgspec

from quire.engine.shared_client import SharedClient
from quire.errors import InternalError
from quire.multimodal.named import NamedPictures

PICTURES = "pictures"
"""Parent's service that keeps named pictures."""


class _Holds(msgspec.Struct, tag="holds"):
    """Question whether the parent has a file; `_Put` sends it only if not."""

    name: bytes
    digest: bytes


class _Put(_Holds, tag="put"):
    file: bytes


class _Find(msgspec.Struct, tag="find"):
    name: bytes


class _Clear(msgspec.Struct, tag="clear"): ...


_Message = _Holds | _Put | _Find | _Clear


class ParentsNames:
    """Named pictures that the parent of this process has, all of them files. Raises EngineDeadError when it or the
    engine is gone, and InternalError when it fails to answer."""

    def __init__(self, client: SharedClient) -> None:
        self._questions = client.questions

    async def put(self, name: bytes, image: bytes) -> None:
        digest = (await asyncio.to_thread(hashlib.sha256, image)).digest()
        if not await self._ask(_Holds(name, digest)):
            await self._ask(_Put(name, digest, image))

    async def picture_of(self, name: bytes) -> bytes | None:
        return await self._ask(_Find(name)) or None

    async def clear(self) -> None:
        await self._ask(_Clear())

    async def _ask(self, message: _Message) -> bytes:
        answer = await self._questions.ask(PICTURES, msgspec.msgpack.encode(message))
        if answer is None:
            raise InternalError("the parent process failed to answer (its log says more)")
        return answer


class PictureService:
    """Parent's half: keeps named pictures of all API processes. Several threads call its methods."""

    def __init__(self, pictures: NamedPictures) -> None:
        self._pictures = pictures

    def answer(self, session: int, message: bytes) -> bytes:
        """Answer to a message of ParentsNames: a file, or b"" for no."""
        match msgspec.msgpack.decode(message, type=_Message):
            case _Put(name, digest, file):
                self._pictures.put(name, file, digest)
            case _Holds(name, digest):
                return b"yes" if self._pictures.holds(name, digest) else b""
            case _Find(name):
                return self._pictures.picture_of(name) or b""
            case _Clear():
                self._pictures.clear()
        return b""
