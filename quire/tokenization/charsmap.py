"""Character table of a sentencepiece model, which maps sequences such as full-width letters to usual ones. At each
position the longest known sequence is replaced.

Format: the index's size in bytes (4 bytes), the index (a darts-clone double array of 32-bit units), and zero-terminated
replacements.
"""

from __future__ import annotations

import re
from array import array

from quire.errors import ModelLoadError
from quire.tokenization.pipeline_checks import MAX_INSERTED, check_charsmap

_PRINTABLE = range(0x20, 0x7F)
_OTHER = "[^ -~]"
_LONGEST_START = 16
"""Maximum printable ASCII characters at a sequence's start."""


class Charsmap:
    def __init__(self, table: bytes) -> None:
        """Raises ModelLoadError for a truncated table."""
        check_charsmap(table)
        size = int.from_bytes(table[:4], "little")
        self._units = array("I", table[4 : 4 + size // 4 * 4])
        if not self._units:
            raise ModelLoadError("its precompiled_charsmap has no index")
        self._replacements = table[4 + size :]
        self._root = self._children(0)
        depth = self._ascii_depth()
        # Most texts are ASCII, and most tables leave ASCII alone: only places that may begin a sequence are looked up.
        self._place = re.compile("(?s:.)" if depth is None else f"[ -~]{{0,{depth}}}{_OTHER}")

    def __call__(self, text: str) -> str:
        parts: list[str] = []
        done = 0
        while (found := self._place.search(text, done)) is not None:
            parts.append(text[done : found.start()])
            done = found.start()
            while done < found.end():
                length, replacement = self._longest(text, done)
                parts.append(text[done : done + 1] if replacement is None else replacement)
                done += length
        parts.append(text[done:])
        return "".join(parts)

    def _longest(self, text: str, start: int) -> tuple[int, str | None]:
        node, length, value = self._root, 1, None
        for end in range(start, len(text)):
            for byte in text[end].encode():
                place = node ^ byte
                if place >= len(self._units) or self._units[place] & 0x800000FF != byte:
                    return length, None if value is None else self._replacement(value)
                node = self._children(place)
            if self._units[place] >> 8 & 1:
                length, value = end - start + 1, self._value(node)
        return length, None if value is None else self._replacement(value)

    def _children(self, place: int) -> int:
        unit = self._units[place]
        return place ^ (unit >> 10) << ((unit & 1 << 9) >> 6)

    def _value(self, node: int) -> int:
        return self._units[node] & 0x7FFFFFFF if node < len(self._units) else len(self._replacements)

    def _replacement(self, first: int) -> str:
        last = self._replacements.find(0, first)
        if last < 0 or last - first > MAX_INSERTED:
            raise ModelLoadError(f"its table of characters has a replacement of more than {MAX_INSERTED} bytes")
        return self._replacements[first:last].decode(errors="replace")

    def _ascii_depth(self) -> int | None:
        nodes, depth = [self._root], 0
        while nodes:
            below = []
            for node in nodes:
                for byte in _PRINTABLE:
                    place = node ^ byte
                    if place < len(self._units) and self._units[place] & 0x800000FF == byte:
                        if self._units[place] >> 8 & 1:
                            return None
                        below.append(self._children(place))
            nodes = below
            depth += bool(nodes)
            if depth > _LONGEST_START or len(nodes) > 2**12:
                return None
        return depth
