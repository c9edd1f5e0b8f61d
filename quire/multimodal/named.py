"""Pictures that clients have named (`uuid`), to send only the name later.

A name belongs to one owner, and means the owner's last picture under it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

import msgspec

from quire.errors import UserError
from quire.multimodal.cache import ENTRY_BYTES
from quire.multimodal.sources import Picture
from quire.multimodal.video_marks import ReadyMedium, ReadyVideo
from quire.prompt_image import ReadyImage


def name_key(owner: str, uuid: str) -> bytes:
    return hashlib.sha256(f"{len(owner)}:{owner}{uuid}".encode()).digest()


class NamedPictures:
    """Pictures by name, the most recently used of together `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Any, bytes, int]] = OrderedDict()
        """Picture, digest of its file, and size in bytes, by name."""
        self._num_bytes = 0

    def put(self, name: bytes, image: Any, digest: bytes = b"") -> None:
        """Give a name to a picture, in place of its former one. image: file's bytes, or a program's picture, copied.
        digest: the file's, for `holds`."""
        image, size = (image, len(image)) if isinstance(image, bytes) else _copied(image)
        size += ENTRY_BYTES
        with self._lock:
            if (before := self._kept.pop(name, None)) is not None:
                self._num_bytes -= before[2]
            if size > self._max_bytes:
                return
            self._kept[name] = image, digest, size
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, (_, _, dropped) = self._kept.popitem(last=False)
                self._num_bytes -= dropped

    def picture_of(self, name: bytes) -> Any:
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                return None
            self._kept.move_to_end(name)
            return found[0]

    def holds(self, name: bytes, digest: bytes) -> bool:
        """True if the name means the file of this digest."""
        with self._lock:
            found = self._kept.get(name)
            if found is None or found[1] != digest:
                return False
            self._kept.move_to_end(name)
            return True

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0


class Names(Protocol):
    """Pictures that clients have named by uuid, in this process or another."""

    async def put(self, name: bytes, image: Any) -> None: ...

    async def picture_of(self, name: bytes) -> Any: ...

    async def clear(self) -> None: ...


class OwnNames:
    """Names over pictures of this process; nothing is waited for."""

    def __init__(self, pictures: NamedPictures) -> None:
        self._pictures = pictures

    async def put(self, name: bytes, image: Any) -> None:
        self._pictures.put(name, image)

    async def picture_of(self, name: bytes) -> Any:
        return self._pictures.picture_of(name)

    async def clear(self) -> None:
        self._pictures.clear()


async def prepared(
    picture: Picture, owner: str, names: Names, prepare: Callable[[Picture], Awaitable[ReadyMedium]]
) -> ReadyMedium:
    """Prepare a picture, which may be known by its name alone, and keep its name. Raises UserError for an unknown
    name."""
    if isinstance(picture.image, ReadyImage | ReadyVideo):
        return picture.image
    name = None if picture.uuid is None else name_key(owner, picture.uuid)
    if picture.image is None:
        image = None if name is None else await names.picture_of(name)
        if image is None:
            raise _unknown_name(picture)
        return await prepare(msgspec.structs.replace(picture, image=image))
    ready = await prepare(picture)
    if name is not None:
        await names.put(name, picture.image)
    return ready


def at_once(prepared: Coroutine[Any, Any, ReadyMedium]) -> ReadyMedium:
    """Result of a coroutine that waits for nothing, such as `prepared` with OwnNames."""
    try:
        prepared.send(None)
    except StopIteration as end:
        return cast(ReadyMedium, end.value)
    raise AssertionError("the coroutine waits")


def _unknown_name(picture: Picture) -> UserError:
    return UserError(
        f"{picture.where}: no picture is known by the uuid {picture.uuid!r:.100}: this client has sent none, or it was "
        f"forgotten; send it again",
        param=picture.where,
    )


def _copied(image: Any) -> tuple[Any, int]:
    if hasattr(image, "getbands"):  # Pillow's
        return image.copy(), image.width * image.height * len(image.getbands())
    import numpy as np

    array = np.array(image)
    return array, array.nbytes
