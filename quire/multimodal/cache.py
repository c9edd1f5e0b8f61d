"""Prepared images and videos, to decode a repeated file once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from quire.multimodal.video_marks import ReadyMedium

ENTRY_BYTES = 512
"""Approximate bytes of an entry besides its pixels."""


class ReadyImages:
    """LRU cache of up to `max_bytes` of prepared images, for the front end. Thread-safe. The key covers the file's
    SHA-256 and all settings of the image."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, ReadyMedium] = OrderedDict()
        self._num_bytes = 0
        self.num_queries = 0
        self.num_hits = 0

    @staticmethod
    def key(data: bytes, how: str) -> bytes:
        """Cache key. how: text of all settings besides the file."""
        digest = hashlib.sha256(len(how).to_bytes(8, "little") + how.encode())
        digest.update(data)  # releases the GIL
        return digest.digest()

    def get(self, key: bytes) -> ReadyMedium | None:
        with self._lock:
            self.num_queries += 1
            found = self._kept.get(key)
            if found is not None:
                self.num_hits += 1
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, image: ReadyMedium) -> None:
        size = image.num_bytes + ENTRY_BYTES
        with self._lock:
            if key in self._kept or size > self._max_bytes:
                return
            self._kept[key] = image
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes + ENTRY_BYTES

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0
