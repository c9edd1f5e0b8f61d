"""Reasoning between two markers before the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from quire.parsers.output import Output
from quire.parsers.reader import Markers, Steps, TextReader

Program = Callable[[TextReader, Output], Steps[None]]
"""Reader of the answer after the reasoning; inside reasoning, of one call and those right after it."""


class Thought(Enum):
    """State of reasoning at the prompt's end: inside reasoning, after it, or free to begin it."""

    OPEN = "open"
    CLOSED = "closed"
    FREE = "free"


@dataclass(frozen=True)
class Break:
    """Marker that begins a call inside reasoning if one text of each of `follows` comes after it, in order, then a
    known tool's name in the format `named` (empty: no name)."""

    mark: str
    follows: tuple[tuple[str, ...], ...] = ()
    named: str = ""

    def parts(self, tools: Iterable[str]) -> list[tuple[str, ...]]:
        """Arguments of `TextReader.sees_in_turn`."""
        names = [tuple(self.named.format(tool) for tool in tools)] if self.named else []
        return [(self.mark,), *self.follows, *names]


@dataclass(frozen=True)
class ThinkFormat:
    """Marks of reasoning. starts, ends: alternative markers. is_open: the output begins inside reasoning even if the
    prompt does not say so. around: omitted markers around the answer. stays: reasoning stays in the content, after its
    start marker."""

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    is_open: bool = False
    around: tuple[str, ...] = ()
    stays: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.starts + self.ends + self.around

    def thought_after(self, prompt: str, *, continues: bool = False, is_held: bool = False) -> Thought:
        """Find the state at a prompt's end. continues: the prompt ends inside an answer, anywhere after the marker;
        otherwise only a marker at its end counts. is_held: a constraint allows reasoning only after a marker."""
        if continues:
            start, end = (max(map(prompt.rfind, marks)) for marks in (self.starts, self.ends))
            if start != end:
                return Thought.OPEN if start > end else Thought.CLOSED
        tail = prompt[-256:].rstrip()
        if tail.endswith(tuple(start.rstrip() for start in self.starts)):
            return Thought.OPEN
        if tail.endswith(self.ends):
            return Thought.CLOSED
        return Thought.OPEN if self.is_open and not is_held else Thought.FREE

    def parse(
        self, reader: TextReader, output: Output, thought: Thought, breaks: Sequence[Break], calls: Program
    ) -> Steps[None]:
        """Read up to the reasoning's end. calls: reads a call inside it at one of `breaks`."""
        if self.stays and thought is Thought.OPEN:
            output.content(self.starts[0])
        if self.stays or thought is Thought.CLOSED:
            return
        space = yield from reader.space()
        for start in self.starts:
            if (yield from reader.sees(start)):
                yield from reader.take(len(start))
                output.begin_thoughts(self.ends)
                break
        else:
            if thought is Thought.OPEN:
                output.begin_thoughts(self.ends)
            output.content(space)
            if thought is Thought.FREE:
                return
        parts = {each.mark: each.parts(output.schemas) for each in breaks}
        marks = Markers(*self.ends, *parts)
        while (mark := (yield from reader.until(marks, output.content))) in parts:
            assert mark is not None
            reader.unread(mark)
            if (yield from reader.sees_in_turn(*parts[mark])):
                yield from calls(reader, output)
            else:
                output.content((yield from reader.take(len(mark))))
        if mark is not None:
            output.end_thoughts()


class ReasoningCounter:
    """Counter of the tokens between reasoning markers, given as token ids.

    is_open: the sequence begins inside reasoning; a start marker right there does not count.
    """

    def __init__(self, starts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]], *, is_open: bool) -> None:
        self._starts = [list(mark) for mark in starts if mark]
        self._ends = [list(mark) for mark in ends if mark]
        self._is_open = is_open
        self._tail: deque[int] = deque(maxlen=max(map(len, self._starts + self._ends), default=1))
        self._num_inside = 0
        self._num_closed = 0

    @property
    def num_tokens(self) -> int:
        return self._num_closed + self._num_inside

    def count(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._tail.append(token_id)
            if (length := self._ending(self._starts)) and (not self._is_open or self._num_inside + 1 == length):
                self._is_open, self._num_inside = True, 0
            elif self._is_open:
                self._num_inside += 1
                if length := self._ending(self._ends):
                    self._num_closed += max(self._num_inside - length, 0)
                    self._is_open, self._num_inside = False, 0

    def _ending(self, marks: list[list[int]]) -> int:
        last = self._tail[-1]
        for mark in marks:
            if mark[-1] == last and list(self._tail)[-len(mark) :] == mark:
                return len(mark)
        return 0
