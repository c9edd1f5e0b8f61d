"""Pictures that clients have named (`uuid`), to send only the name later.

A name belongs to one owner, and means the owner's last picture under it.
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
        """Give a name to a picture, in place of its former one. image: file's bytes, or a program's picture, which is
        copied. digest: the file's, for `holds`."""
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


def unknown_name(picture: Picture) -> UserError:
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
