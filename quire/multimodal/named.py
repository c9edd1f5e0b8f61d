"""Pictures that clients have named (`uuid`) and may name again in place of sending them.

A name belongs to one owner, and means the picture that the owner sent last under it. It finds the picture's file, which
is then taken as if it had been sent: names are in no key of a cache.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

from quire.errors import UserError
from quire.multimodal.cache import ENTRY_BYTES
from quire.multimodal.sources import Picture


def name_key(owner: str, uuid: str) -> bytes:
    """The key of an owner's name for a picture."""
    return hashlib.sha256(f"{len(owner)}:{owner}{uuid}".encode()).digest()


class NamedPictures:
    """Up to `max_bytes` of files and pictures by name; those that were used last are kept. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Any, bytes, int]] = OrderedDict()
        """By name: the picture, the digest of its file, and its bytes."""
        self._num_bytes = 0

    def put(self, name: bytes, image: Any, digest: bytes = b"") -> None:
        """Let a name mean a picture, in place of what it meant. image: a file's bytes, or a picture of a program, which
        is copied. digest: of the file, for `holds`."""
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

    def find(self, name: bytes) -> Any:
        """What the name means; None: nothing."""
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                return None
            self._kept.move_to_end(name)
            return found[0]

    def holds(self, name: bytes, digest: bytes) -> bool:
        """Whether the name means the file of this digest."""
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


def unknown_name(picture: Picture) -> UserError:
    """The error of a name that means nothing."""
    return UserError(
        f"{picture.where}: no picture is known by the uuid {picture.uuid!r:.100}: this client has sent none, or it was "
        f"forgotten; send it again",
        param=picture.where,
    )


def _copied(image: Any) -> tuple[Any, int]:
    """A copy of a program's picture, which the program does not change, and its bytes."""
    if hasattr(image, "getbands"):  # Pillow's
        return image.copy(), image.width * image.height * len(image.getbands())
    import numpy as np

    array = np.array(image)
    return array, array.nbytes
