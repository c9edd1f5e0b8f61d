from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from quire.cli.session import RunSession, Timing
from quire.outputs import CompletionOutput
from quire.sampling_params import SamplingParams
from quire.utils.server_connection import ServerConnection, ServerGoneError, error_message
from quire.utils.sse import EventParser

if TYPE_CHECKING:
    from quire.server.answer_format import AnswerFormats

Message = dict[str, Any]
SECONDS_WITHOUT_A_BYTE = 600.0
"""Seconds of silence after which the server counts as gone."""


class ReplyPiece(NamedTuple):
    thoughts: str
    content: str


class AnswerSource(Protocol):
    def check(self) -> None:
        """Raise UserError, before `quire chat` asks, if no conversation is possible."""

    def ask(
        self, messages: Sequence[Message], settings: Mapping[str, Any], write: Callable[[ReplyPiece], None]
    ) -> Timing:
        """Write the answer as it comes. settings: fields of SamplingParams. Raises UserError for a refused question,
        another QuireError for a failed answer; an interrupt (Ctrl-C) ends the request."""


class LocalAnswers:
    """Answers of an engine in this process. reasoning_parser: parser name, `auto` (by the chat template) or `none`."""

    def __init__(self, session: RunSession, reasoning_parser: str) -> None:
        self._session = session
        self._reasoning_parser = reasoning_parser
        self._formats: AnswerFormats | None = None

    def check(self) -> None:
        from quire.server.answer_format import AnswerFormats
        from quire.server.settings import ServerSettings

        engine = self._session.engine
        engine.render_chat([{"role": "user", "content": "hello"}])
        settings = ServerSettings.from_keywords({"reasoning_parser": self._reasoning_parser})
        self._formats = AnswerFormats.of(engine.tokenizer, settings)

    def ask(
        self, messages: Sequence[Message], settings: Mapping[str, Any], write: Callable[[ReplyPiece], None]
    ) -> Timing:
        from quire.server.protocol.chat import ChatRequest

        assert self._formats is not None, "check comes first"
        answer = self._formats.answer(ChatRequest(messages=[]))
        chat = self._session.engine.render_chat(messages)
        params = answer.settle(SamplingParams.from_options(dict(settings)), chat.text)

        def take(completion: CompletionOutput) -> None:
            delta = answer.read(completion)
            write(ReplyPiece(delta.reasoning, delta.content))

        return self._session.stream(chat.prompt(), params, take)


class _ReplyDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _ReplyChoice(msgspec.Struct):
    delta: _ReplyDelta = _ReplyDelta()
    text: str = ""


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _ReplyUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _ReplyChunk(msgspec.Struct):
    choices: list[_ReplyChoice] = []
    usage: _ReplyUsage | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServerAnswers:
    """Answers of a server with OpenAI's chat completions. model: served name; None: the first."""

    def __init__(self, connection: ServerConnection, model: str | None) -> None:
        self._connection = connection
        self._model = model

    def check(self) -> None:
        with self._connection.request("GET", "/v1/models") as response:
            names = [model.id for model in msgspec.json.decode(response.read(), type=_Models).data]
        if not names:
            raise ServerGoneError(f"{self._connection.url} serves no model")
        self._model = self._model or names[0]

    def ask(
        self, messages: Sequence[Message], settings: Mapping[str, Any], write: Callable[[ReplyPiece], None]
    ) -> Timing:
        body = {"model": self._model, "messages": messages, **settings}
        timing = Timing()
        for chunk in _chunks(self._connection, "/v1/chat/completions", body):
            _take(chunk, timing, write)
        return timing

    def complete(self, prompt: str, settings: Mapping[str, Any], write: Callable[[ReplyPiece], None]) -> Timing:
        """Complete a text as it is, without chat template; see `ask`."""
        timing = Timing()
        for chunk in _chunks(self._connection, "/v1/completions", {"model": self._model, "prompt": prompt, **settings}):
            _take(chunk, timing, write)
        return timing


def _chunks(connection: ServerConnection, path: str, body: dict[str, Any]) -> Iterator[_ReplyChunk]:
    parser, decoder = EventParser(), msgspec.json.Decoder(_ReplyChunk)
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with connection.request("POST", path, body=body) as response:
        for data in response.iter_raw():
            for event in parser.feed(data):
                if event == b"[DONE]":
                    return
                failure = error_message(event)
                if failure is not None:
                    raise ServerGoneError(failure)
                yield decoder.decode(event)
    raise ServerGoneError(f"{connection.url} closed the connection amid an answer")


def _take(chunk: _ReplyChunk, timing: Timing, write: Callable[[ReplyPiece], None]) -> None:
    for choice in chunk.choices[:1]:
        thoughts = choice.delta.reasoning_content or choice.delta.reasoning or ""
        content = choice.delta.content or choice.text
        if thoughts or content:
            timing.count(0)
            write(ReplyPiece(thoughts, content))
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        timing.num_prompt_tokens = chunk.usage.prompt_tokens
        timing.num_output_tokens = chunk.usage.completion_tokens
        timing.num_cached_tokens = (details.cached_tokens if details is not None else None) or 0
