"""Turn of the assistant: other APIs convert their requests to chat completions, and the answer's events to their own
(docs/decisions/0043-one-pipeline-of-answers.md).
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from fastapi import Request

from quire.errors import EngineDeadError, UserError
from quire.parsers.output import CallPiece, OutputDelta, called_arguments
from quire.sampling_params import SamplingParams
from quire.server.answer import Begin, Piece, header_id
from quire.server.auth import client_of
from quire.server.body import parse_fields, report_ignored
from quire.server.chat import AskedRoute, ChatAnswer
from quire.server.completions import CompletionAnswer
from quire.server.context import ServerContext
from quire.server.errors import ApiError, unavailable
from quire.server.generation import render_chat
from quire.server.protocol.chat import ChatLogprob, ChatRequest
from quire.server.protocol.common import AnswerTimes, Usage
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.messages import ReadMessages
from quire.tokenization.conversation import Messages

ENDED_BY_SERVER = {
    "abort": "the server ended the request",
    "timeout": "the request ran out of time",
    "error": "the model computed no numbers",
}
"""Finish reasons that other APIs lack."""


class Kind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Segment:
    """Part of the turn: reasoning, text or a tool call, whose `text` is the JSON of its arguments. index: position
    among the parts. call_id, name: only for calls."""

    def __init__(self, index: int, kind: Kind, call_id: str = "", name: str = "") -> None:
        self.index, self.kind, self.call_id, self.name = index, kind, call_id, name
        self._pieces: list[str] = []
        self.logprobs: list[ChatLogprob] = []
        """Log-probabilities of the tokens of text and reasoning, if requested."""

    def as_opened(self) -> Segment:
        """Segment as it is before its first piece, for the event that opens it."""
        return Segment(self.index, self.kind, self.call_id, self.name)

    def append(self, piece: str) -> None:
        self._pieces.append(piece)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        return called_arguments(self.text)


class Step(enum.Enum):
    """Kind of event: the turn's first token, or a part that begins, grows or ends."""

    BEGIN = 0
    OPEN = 1
    GROW = 2
    CLOSE = 3


class Event(NamedTuple):
    step: Step
    segment: Segment | None = None
    piece: str = ""
    logprobs: Sequence[ChatLogprob] = ()


class Turn:
    """Answer to another API's request being generated. Its fields are complete when `events` has ended."""

    def __init__(self, answer: ChatAnswer | CompletionAnswer, names: dict[str, str]) -> None:
        """Turn of an admitted answer. names: the chat endpoint's field names -> the request's."""
        self._answer, self._names = answer, names
        self.response_id = answer.engine_id
        """Unique id, even for a repeated X-Request-Id."""
        self.segments: list[Segment] = []
        self.finish_reason = ""
        self.stop_string: str | None = None
        """Stop string that ended the turn, if any."""
        self.prompt_token_ids: list[int] = []
        self.token_ids: list[int] = []
        """Token ids of the prompt and the turn, if requested."""
        self._open: Segment | None = None
        self._call_index: int | None = None
        self._logprobs: list[ChatLogprob] = []
        """Log-probabilities of tokens whose text is still missing."""

    @property
    def usage(self) -> Usage:
        return self._answer.usage

    @property
    def times(self) -> AnswerTimes:
        return self._answer.times or AnswerTimes()

    @property
    def params(self) -> SamplingParams:
        return self._answer.params

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events as they come. Raises as ChatAnswer.events does; ApiError (503) if the server ended the
        request early."""
        try:
            async with aclosing(self._answer.events()) as events:
                async for event in events:
                    if isinstance(event, Begin):
                        self.prompt_token_ids = event.output.prompt_token_ids
                        yield Event(Step.BEGIN)
                    else:
                        for step in self._take(event):
                            yield step
        except (ApiError, UserError) as error:
            raise error.named(self._names) from None
        for step in self._close():
            yield step
        if (reason := ENDED_BY_SERVER.get(self.finish_reason)) is not None:
            raise unavailable(f"{reason} before its end (finish reason {self.finish_reason!r})")

    async def run(self) -> Turn:
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self

    def _take(self, piece: Piece) -> list[Event]:
        found: list[Event] = []
        if piece.logprobs is not None:
            self._logprobs += piece.logprobs.content
        self.token_ids += piece.token_ids or ()
        *firsts, last = piece.delta.parts or [piece.delta]
        for part in firsts:
            found += self._take_part(part, is_last=False)
        found += self._take_part(last, is_last=True)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_string = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        return found

    def _take_part(self, delta: OutputDelta, *, is_last: bool) -> list[Event]:
        found: list[Event] = []
        is_last = is_last and not delta.tool_calls
        if delta.reasoning:
            found += self._tell(Kind.REASONING, delta.reasoning, is_last=is_last and not delta.content)
        if delta.content:
            found += self._tell(Kind.TEXT, delta.content, is_last=is_last)
        for call in delta.tool_calls:
            if self._open is None or self._open.kind is not Kind.CALL or call.index != self._call_index:
                found += self._begin(Kind.CALL, call)
            if call.arguments:
                found.append(self._grow(call.arguments))
        return found

    def _tell(self, kind: Kind, text: str, *, is_last: bool) -> list[Event]:
        pending, start, found = self._logprobs, 0, list[Event]()
        first, end = _place(pending, text, is_last=is_last)
        if self._open is None or self._open.kind is not kind:
            start, found = first, self._begin(kind)
        self._logprobs = pending[end:]
        return [*found, self._grow(text, pending[start:end])]

    def _begin(self, kind: Kind, call: CallPiece | None = None) -> list[Event]:
        closed = self._close()
        segment = Segment(len(self.segments), kind)
        if call is not None:
            self._call_index = call.index
            segment.call_id = call.id or f"call_{self.response_id}_{call.index}"
            segment.name = call.name or ""
        self.segments.append(segment)
        self._open = segment
        return [*closed, Event(Step.OPEN, segment)]

    def _grow(self, piece: str, logprobs: Sequence[ChatLogprob] = ()) -> Event:
        assert self._open is not None
        self._open.append(piece)
        self._open.logprobs += logprobs
        return Event(Step.GROW, self._open, piece, logprobs)

    def _close(self) -> list[Event]:
        segment, self._open = self._open, None
        return [] if segment is None else [Event(Step.CLOSE, segment)]


def _place(logprobs: list[ChatLogprob], text: str, *, is_last: bool) -> tuple[int, int]:
    """Bounds of the tokens with the text. Its beginning may be an earlier token's. is_last: nothing follows but what
    has no text."""
    pieces, wanted = [bytes(entry.bytes or entry.token.encode()) for entry in logprobs], text.encode()
    ends = list(itertools.accumulate(map(len, pieces)))
    joined = b"".join(pieces)
    start = joined.rfind(wanted) if is_last else joined.find(wanted)
    end = start + len(wanted)
    if start < 0:
        begun = (size for size in range(min(len(joined), len(wanted)), 0, -1) if wanted.endswith(joined[:size]))
        start, end = 0, next(begun, len(joined))
    return bisect.bisect_right(ends, start), min(bisect.bisect_left(ends, end) + 1, len(pieces))


def chat_body(fields: dict[str, Any], messages: Messages, names: dict[str, str]) -> ChatRequest:
    """Chat completion for a request. fields: its body without messages. names: the chat endpoint's field names -> the
    request's, for errors. Raises ApiError as the chat endpoint does."""
    last = {"role": "assistant" if fields.get("continue_final_message") else "user", "content": ""}
    try:
        chat = parse_fields({**fields, "stream": True, "messages": [last]}, ChatRequest)[0]
    except (ApiError, UserError) as error:
        raise error.named(names) from None
    return msgspec.structs.replace(chat, messages=ReadMessages(chat.messages[0], messages))


async def count_prompt_tokens(context: ServerContext, body: ChatRequest, names: dict[str, str]) -> int:
    """Count the tokens of the rendered prompt. Raises ApiError."""
    try:
        tools = context.formats.answer(body).template_tools
        return len((await render_chat(context, body, tools)).token_ids)
    except UserError as error:
        raise error.named(names) from None


def begin_turn(
    context: ServerContext,
    request: Request,
    body: ChatRequest,
    names: dict[str, str],
    *,
    asked: AskedRoute,
    ends_with_context: bool = False,
) -> Turn:
    """Admit the request. asked, ends_with_context: see ChatAnswer. Raises ApiError."""

    def answer() -> ChatAnswer:
        return ChatAnswer(context, body, header_id(request), ends_with_context=ends_with_context, asked=asked)

    return _begin(context, request, body.priority, answer, names)


def begin_completion(
    context: ServerContext, request: Request, body: CompletionRequest, names: dict[str, str], *, ends_with_context: bool
) -> Turn:
    """Admit a request of one prompt, without a chat template. Raises ApiError."""

    def answer() -> CompletionAnswer:
        return CompletionAnswer(context, body, header_id(request), ends_with_context=ends_with_context)

    return _begin(context, request, body.priority, answer, names)


def _begin(
    context: ServerContext,
    request: Request,
    priority: int,
    make: Callable[[], ChatAnswer | CompletionAnswer],
    names: dict[str, str],
) -> Turn:
    context.admit()
    context.check_priority(priority, client_of(request))
    try:
        answer = make()
        # These APIs have no `function` object inside a tool.
        report_ignored(request, context, [name.replace("[].function", "[]") for name in answer.ineffective_fields])
        return Turn(answer, names)
    except EngineDeadError:
        raise
    except (ApiError, UserError) as error:
        raise error.named(names) from None
