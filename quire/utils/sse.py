"""Server-sent events of a byte stream (data fields only)."""

from __future__ import annotations

from collections.abc import Iterator


class EventParser:
    """Parser fed with bytes, so split multi-byte characters are safe."""

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        lines = (self._pending + chunk).splitlines(keepends=True)
        # The last line waits until its end is certain: more of it, or the LF of a CR LF, may follow.
        self._pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            data = self._take(line.rstrip(b"\r\n"))
            if data is not None:
                yield data

    def _take(self, line: bytes) -> bytes | None:
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        data = b"\n".join(self._data)
        self._data.clear()
        return data
