"""Parser of one completion's text as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.parsers.json_calls import copy_calls, copy_value
from quire.parsers.output import Output, OutputDelta, call_id
from quire.parsers.reader import Steps, TextReader
from quire.parsers.reasoning import Break, Program, ThinkFormat, Thought


class OutputParser:
    """Parser of one output into content, reasoning and tool calls, however the text is cut. Not thread-safe. Never
    raises. answer: reader of the text after the reasoning. reasoning: None if the model has none or `answer` reads it.
    breaks: beginnings of calls inside reasoning. thought: state at the prompt's end. schemas: tool name -> JSON schema
    of its parameters. max_calls: None for no limit. drops: markers around content."""

    def __init__(
        self,
        answer: Program,
        reasoning: ThinkFormat | None = None,
        *,
        breaks: Sequence[Break] = (),
        thought: Thought = Thought.FREE,
        schemas: Mapping[str, Any] | None = None,
        new_id: Callable[[], str] = call_id,
        max_calls: int | None = None,
        drops: Sequence[str] = (),
    ) -> None:
        self._reader = TextReader()
        self._output = Output(schemas, new_id, max_calls, (*drops, *(reasoning.around if reasoning else ())))
        thoughts = None if reasoning is None else reasoning.parse(self._reader, self._output, thought, breaks, answer)
        self._steps = self._read(answer, thoughts)
        self._is_done = False
        self._advance()

    @property
    def num_calls(self) -> int:
        """Number of calls so far, with dropped ones."""
        return self._output.num_calls

    def feed(self, text: str, *, is_last: bool = False) -> OutputDelta:
        """Output that this text makes certain. is_last: also the text held back."""
        if text:
            self._reader.push(text)
            self._advance()
        if is_last:
            self._reader.end()
            self._advance()
            self._output.finish()
        return self._output.take()

    def finish(self) -> OutputDelta:
        """End the text; return the output held back."""
        return self.feed("", is_last=True)

    def _read(self, answer: Program, thoughts: Steps[None] | None) -> Steps[None]:
        if thoughts is not None:
            yield from thoughts
        yield from answer(self._reader, self._output)
        yield from self._output.rest(self._reader)

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, True) is True


def plain(reader: TextReader, output: Output) -> Steps[None]:
    yield from output.rest(reader)


def call_list(reader: TextReader, output: Output) -> Steps[None]:
    """Read a JSON list of calls (name, parameters), which a constraint to tools forces."""
    output.content((yield from copy_calls(reader, output)))


def named_call(name: str) -> Program:
    """Reader of one tool's arguments, which a constraint forces. Other text is content."""

    def parse(reader: TextReader, output: Output) -> Steps[None]:
        output.content((yield from reader.space()))
        if (yield from reader.peek()) != "{":
            return
        output.begin_call(name)
        yield from copy_value(reader, output.arguments)
        yield from reader.space()

    return parse
