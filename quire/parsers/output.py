"""Pieces of a parser's output."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.parsers.reader import Markers, Steps, TextReader

SHORT_ID = string.ascii_letters + string.digits


class CallPiece(msgspec.Struct):
    """Piece of call number `index`. A call's first piece has id and name. arguments: more of the JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class OutputDelta(msgspec.Struct):
    """New output since the last delta. parts: in order, if it is not reasoning, content, calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[CallPiece] = []
    parts: list[OutputDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def called_arguments(text: str) -> dict[str, Any]:
    """Arguments of a complete call; {} if cut off or not an object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def call_id() -> str:
    """Random id of a tool call, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def short_call_id() -> str:
    """Random id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(SHORT_ID) for _ in range(9))


class Output:
    """Collector of a parser's output between two calls of `take`.

    White space before content or between calls is held back. schemas: tool name -> JSON schema of the parameters.
    max_calls: later calls are dropped. drops: markers around content, which are omitted.
    """

    __slots__ = (
        "_content",
        "_drops",
        "_held",
        "_max_calls",
        "_new_id",
        "_parts",
        "_pieces",
        "_reasoning",
        "ends",
        "num_calls",
        "schemas",
    )

    def __init__(
        self,
        schemas: Mapping[str, Any] | None = None,
        new_id: Callable[[], str] = call_id,
        max_calls: int | None = None,
        drops: tuple[str, ...] = (),
    ) -> None:
        self.schemas = schemas or {}
        self._drops = drops
        self._new_id = new_id
        self._max_calls = max_calls
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []
        self._parts: list[OutputDelta] = []
        self._held: list[str] | None = []
        """White space before content; None inside content."""
        self.num_calls = 0
        self.ends: tuple[str, ...] = ()
        """Markers that end the current reasoning; empty outside."""

    def begin_thoughts(self, ends: tuple[str, ...]) -> None:
        """Treat content as reasoning up to one of these markers."""
        self.ends, self._held = ends, None

    def end_thoughts(self) -> None:
        self.ends, self._held = (), []

    def until(self, reader: TextReader, markers: Markers) -> Steps[str | None]:
        """Read content and the first marker, which is returned. Inside reasoning only read a marker that comes next."""
        if not self.ends:
            return (yield from self._content_until(reader, markers))
        for text in markers.texts:
            if (yield from reader.sees(text)):
                return (yield from reader.take(len(text)))
        return None

    def rest(self, reader: TextReader) -> Steps[None]:
        if self._drops:
            yield from self._content_until(reader, Markers(*self._drops))
        else:
            yield from reader.rest(self.content)

    def _content_until(self, reader: TextReader, markers: Markers) -> Steps[str | None]:
        if not self._drops:
            return (yield from reader.until(markers, self.content))
        all_marks = Markers(*markers.texts, *self._drops)
        while (mark := (yield from reader.until(all_marks, self.content))) in self._drops:
            self._held = self._held or []  # white space around the mark is dropped with it, unless text follows
        return mark

    def reasoning(self, text: str) -> None:
        self._sink(is_reasoning=True).append(text)

    def content(self, text: str) -> None:
        """Add content, which inside reasoning is reasoning."""
        if self._held is not None:
            self._held.append(text)
            if text.isspace() or not text:
                return
            text, self._held = "".join(self._held), None
        self._sink(is_reasoning=bool(self.ends)).append(text)

    def begin_call(self, name: str, identifier: str | None = None) -> None:
        """Begin a tool call. identifier: model's id; None for a random one."""
        self._held = []
        self.num_calls += 1
        if not self._is_full:
            self._pieces.append(CallPiece(self.num_calls - 1, identifier or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if self._is_full or not text:
            return
        index = self.num_calls - 1
        if self._pieces and self._pieces[-1].index == index:
            self._pieces[-1].arguments += text
        else:
            self._pieces.append(CallPiece(index, arguments=text))

    def knows(self, name: str) -> bool:
        """True if the tool exists, or no tools are known."""
        return not self.schemas or name in self.schemas

    def may_call(self, name: str) -> bool:
        """True if text after a marker can be a tool's name."""
        return len(name.split()) == 1 and (not self.ends or self.knows(name))

    def finish(self) -> None:
        """End the output: white space alone is content unless a call was made."""
        if self._held and not self.num_calls and not self.ends:
            self._sink(is_reasoning=False).extend(self._held)
        self._held = []

    def take(self) -> OutputDelta:
        self._end_part()
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        calls = [piece for part in parts for piece in part.tool_calls]
        return OutputDelta(
            "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls, parts
        )

    def _sink(self, *, is_reasoning: bool) -> list[str]:
        if self._pieces or (is_reasoning and self._content):
            self._end_part()
        return self._reasoning if is_reasoning else self._content

    def _end_part(self) -> None:
        self._parts.append(OutputDelta("".join(self._reasoning), "".join(self._content), self._pieces))
        self._reasoning, self._content, self._pieces = [], [], []

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls
