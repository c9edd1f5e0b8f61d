"""An engine that answers with given texts, for the commands that stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import UserError
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import SamplingParams


class Rendered(NamedTuple):
    text: str
    token_ids: list[int]

    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.token_ids, "prompt": self.text}


@dataclass
class FakeTokenizer:
    """A tokenizer without special tokens."""

    chat_templates: dict[str, str] = field(default_factory=dict)

    def token_to_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


@dataclass
class FakeEngine:
    """pieces: one per generated token; a piece that is an exception is raised instead."""

    pieces: Sequence[str | BaseException] = ("Hel", "lo", " wörld")
    has_template: bool = True
    finish_reason: str = "length"
    requests: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    is_shut_down: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        if not self.has_template:
            raise UserError("this model has no chat template")
        return Rendered(json.dumps(list(messages)), [1, 2, 3])

    async def register_prefix(self, prefix: str) -> str:
        self.prefixes.append(prefix)
        return f"prefix-{len(self.prefixes)}"

    async def generate(
        self, prompt: Any, params: SamplingParams, *, delta: bool = False
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append((prompt, params))
        text = ""
        for count, piece in enumerate(self.pieces, start=1):
            if isinstance(piece, BaseException):
                raise piece
            text += piece
            is_last = count == len(self.pieces)
            token_ids = [100 + count] if delta else [101 + number for number in range(count)]
            outputs = [
                CompletionOutput(
                    index=index,
                    text=piece if delta else text,
                    token_ids=token_ids,
                    cumulative_logprob=-1.5,
                    logprobs=[{101: Logprob(-0.5, 1, "Hel")}] if params.logprobs is not None else None,
                    finish_reason=self.finish_reason if is_last else None,
                )
                for index in range(params.n)
            ]
            yield RequestOutput("r", "the prompt", [7, 8], outputs, finished=is_last, num_cached_tokens=1)

    def shutdown(self) -> None:
        self.is_shut_down = True
