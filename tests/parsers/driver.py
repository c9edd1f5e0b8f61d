"""Feeding a parser, and joining what it says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.parsers.output import OutputDelta
from quire.parsers.parser import OutputParser, plain
from quire.parsers.reasoning import Thought
from quire.parsers.registry import HARMONY_REASONING, TOOL_FORMATS, reasoning_format


@dataclass
class Joined:
    """A whole output. calls: (id, name, arguments) in order."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for piece in delta.tool_calls:
            if piece.name is not None:
                assert piece.index == len(self.calls), "calls begin in order"
                assert piece.id
                self.calls.append((piece.id, piece.name, piece.arguments))
            else:
                assert piece.index == len(self.calls) - 1, "a piece belongs to the last call"
                assert piece.id is None
                assert piece.arguments
                last_id, name, arguments = self.calls[-1]
                self.calls[-1] = (last_id, name, arguments + piece.arguments)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]


def counting_ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call-{next(counter)}"


def make_parser(
    tools: str | None = None,
    reasoning: str | None = None,
    thought: Thought = Thought.FREE,
    schemas: Mapping[str, Any] | None = None,
    max_calls: int | None = None,
) -> OutputParser:
    answer = plain if tools is None else TOOL_FORMATS[tools].parse
    form = None if reasoning is None else reasoning_format(reasoning)
    form = None if form is HARMONY_REASONING else form
    breaks = () if tools is None else TOOL_FORMATS[tools].breaks
    return OutputParser(
        answer,
        form,
        breaks=breaks,
        thought=thought,
        schemas=schemas,
        new_id=counting_ids(),
        max_calls=max_calls,
        drops=() if tools is None else TOOL_FORMATS[tools].around,
    )


def parse(parser: OutputParser, pieces: str | list[str]) -> Joined:
    """Feed the pieces, the last of a list as the last one; a text is fed character by character, and then ended."""
    joined = Joined()
    for index, piece in enumerate(pieces):
        joined.add(parser.feed(piece, is_last=isinstance(pieces, list) and index == len(pieces) - 1))
    if isinstance(pieces, str) or not pieces:
        joined.add(parser.finish())
    return joined


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` in pieces that end at `places`."""
    borders = [0, *sorted({min(place, len(text)) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]
