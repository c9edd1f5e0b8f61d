"""What models write: reasoning and tool calls of every format, damaged, mixed with each other's marks, cut anywhere.

The promises: a parser raises nothing and holds back little, its answer depends on the text and not on the cuts, and it
says no more than it read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from quire.parsers.reasoning import Thought
from quire.parsers.registry import HARMONY_REASONING, REASONING_FORMATS, TOOL_FORMATS
from tests.fuzz.harness import Attack, Fuzzer
from tests.parsers.driver import cut, make_parser, parse
from tests.parsers.writers import WRITERS

THINKERS = sorted(name for name, form in REASONING_FORMATS.items() if form is not HARMONY_REASONING)
MARKS = sorted(
    {mark for form in TOOL_FORMATS.values() for mark in form.markers}
    | {mark for name in THINKERS for mark in (*REASONING_FORMATS[name].starts, *REASONING_FORMATS[name].ends)}
)
NASTY = (
    "{" * 300, "[" * 300, "(" * 300, '{"a":' * 200, "\\" * 99, '"', "'", "\x00", "\ud7ff", "é" * 50, "9" * 5000,
    "1e999", "\\u", "\\ud800", "NaN", "\n" * 50, " " * 200, "</", "<|", "```json", "f(a=", "=", ":", ",", "]", "}", ")",
)  # fmt: skip
VALUES = (None, True, -(2**70), 1e300, "x</tool_call>", "a\nb", [[]], {"a": {"b": [1, "]"]}}, "<think>", '"}')
SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}},
    "g": True,
}


def made(rng: Random) -> str:
    """Calls as models write them, with marks, nasty texts and edits."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.5:
            calls = [(rng.choice("fgh"), {rng.choice("ab"): rng.choice(VALUES)}) for _ in range(rng.randint(1, 2))]
            parts.append(rng.choice(WRITERS)[1](calls))
        elif kind < 0.8:
            parts.append("".join(rng.choice(MARKS) for _ in range(rng.randint(1, 3))))
        else:
            parts.append(rng.choice(NASTY))
    text = "".join(parts)
    for _ in range(rng.choice((0, 0, 1, 3))):
        start = rng.randint(0, len(text))
        text = text[:start] + rng.choice(("", *NASTY[-12:])) + text[start + rng.randint(0, 6) :]
    return text[:20_000]


@contextmanager
def target() -> Iterator[Attack]:
    def attack(rng: Random) -> None:
        text = made(rng)
        tools = rng.choice((None, *TOOL_FORMATS))
        reasoning, thought = rng.choice((None, *THINKERS)), rng.choice(list(Thought))
        if tools is not None and TOOL_FORMATS[tools].channels is not None:
            reasoning = None
        schemas = rng.choice((None, SCHEMAS))
        most = rng.choice((None, 0, 1))

        def read(pieces: list[str]) -> object:
            return parse(make_parser(tools, reasoning, thought, schemas, most), pieces)

        what = f"{tools} {reasoning} {thought.name} {text[:500]!r}"
        whole = read([text])
        assert read(cut(text, [rng.randint(0, len(text)) for _ in range(8)])) == whole, what
        assert read(list(text)) == whole, what
        assert len(json.dumps(whole.__dict__)) <= 40 * len(text) + 1000, f"it says more than it read: {what}"

    yield attack


FUZZER = Fuzzer("outputs", target, num_test_cases=150)
