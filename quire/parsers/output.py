"""What a parser says: pieces of reasoning, of content and of tool calls."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.parsers.reader import Markers, Steps, TextReader

SHORT_ID = string.ascii_letters + string.digits


class ToolCallDelta(msgspec.Struct):
    """A piece of call number `index`. The first one of a call has its id and name. arguments: more of the JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class OutputDelta(msgspec.Struct):
    """What is new. Joined over a whole output: its reasoning, its content, its calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def called_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call whose text is complete; {} for one that is cut off or no object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def call_id() -> str:
    """A random id in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def short_call_id() -> str:
    """A random id as Mistral's templates want it: nine letters and digits."""
    return "".join(secrets.choice(SHORT_ID) for _ in range(9))


class Output:
    """Collects what a parser says between two takes.

    White space at the beginning of content, or between calls, is held back until something else comes: it is part of
    the content before a word, and dropped before and behind a call. schemas: name -> JSON schema of the parameters of
    each tool. max_calls: calls after that many are dropped. drops: marks around content that are no part of it.
    """

    __slots__ = (
        "_content",
        "_drops",
        "_held",
        "_max_calls",
        "_new_id",
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
        self._pieces: list[ToolCallDelta] = []
        self._held: list[str] | None = []
        """White space that begins a stretch of content; None inside one."""
        self.num_calls = 0
        self.ends: tuple[str, ...] = ()
        """Marks that end the thoughts which the text is inside of; empty: it is inside none."""

    def begin_thoughts(self, ends: tuple[str, ...]) -> None:
        """What comes as content is reasoning, up to one of these marks."""
        self.ends, self._held = ends, None

    def end_thoughts(self) -> None:
        self.ends, self._held = (), []

    def until(self, reader: TextReader, markers: Markers) -> Steps[str | None]:
        """Read up to the first marker, as content, and the marker. Inside thoughts no further than a marker that comes
        next: what else is in them is not for the reader of calls. Returns the marker, None where there is none."""
        if not self.ends:
            return (yield from self._content_until(reader, markers))
        for text in markers.texts:
            if (yield from reader.sees(text)):
                return (yield from reader.take(len(text)))
        return None

    def rest(self, reader: TextReader) -> Steps[None]:
        """Read all that comes as content."""
        if self._drops:
            yield from self._content_until(reader, Markers(*self._drops))
        else:
            yield from reader.rest(self.content)

    def _content_until(self, reader: TextReader, markers: Markers) -> Steps[str | None]:
        if not self._drops:
            return (yield from reader.until(markers, self.content))
        all_marks = Markers(*markers.texts, *self._drops)
        while (mark := (yield from reader.until(all_marks, self.content))) in self._drops:
            self._held = self._held or []  # white space on either side belongs to the mark, if nothing else comes
        return mark

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def content(self, text: str) -> None:
        """Inside thoughts it is reasoning."""
        sink = self._reasoning if self.ends else self._content
        if self._held is not None:
            self._held.append(text)
            if text.isspace() or not text:
                return
            sink += self._held
            self._held = None
        else:
            sink.append(text)

    def begin_call(self, name: str, identifier: str | None = None) -> None:
        """identifier: the one that the model wrote; None: a random one."""
        self._held = []
        self.num_calls += 1
        if not self._is_full:
            self._pieces.append(ToolCallDelta(self.num_calls - 1, identifier or self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if self._is_full or not text:
            return
        index = self.num_calls - 1
        if self._pieces and self._pieces[-1].index == index:
            self._pieces[-1].arguments += text
        else:
            self._pieces.append(ToolCallDelta(index, arguments=text))

    def knows(self, name: str) -> bool:
        """Whether there is such a tool. Where no tools were named, any may exist."""
        return not self.schemas or name in self.schemas

    def may_call(self, name: str) -> bool:
        """Whether a text behind a mark alone can be a tool's name. A model may speak of the mark in its thoughts."""
        return len(name.split()) == 1 and (not self.ends or self.knows(name))

    def finish(self) -> None:
        """Nothing follows: white space alone is the whole content, if no call was made."""
        if self._held and not self.num_calls and not self.ends:
            self._content += self._held
        self._held = []

    def take(self) -> OutputDelta:
        """What came since the last call of `take`."""
        delta = OutputDelta("".join(self._reasoning), "".join(self._content), self._pieces)
        self._reasoning, self._content, self._pieces = [], [], []
        return delta

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls
