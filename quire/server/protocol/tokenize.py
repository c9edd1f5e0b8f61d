"""Bodies of POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from quire.errors import UserError
from quire.server.protocol.chat import TemplateInputs, TemplateSource
from quire.server.protocol.common import RequestStruct, TokenId
from quire.server.protocol.messages import Messages, check_continuation
from quire.server.protocol.tools import Tools

_OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "tools",
)


class TokenizeRequest(RequestStruct, kw_only=True, frozen=True):
    """Either `prompt` or `messages` with inputs of the chat template. add_special_tokens: default true for a prompt,
    false for messages. return_token_strs: also return vocabulary entries. content: text of a llama.cpp client, answered
    in its form; add_special (default false) and with_pieces mean add_special_tokens and return_token_strs."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: TemplateSource | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    tools: Tools = msgspec.field(default_factory=list)
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"parse_special": (True,)}

    def __post_init__(self) -> None:
        if self.content is not None:
            if self.prompt is not None or self.messages is not None:
                raise UserError("content goes without prompt and messages", param="content")
            return
        for name in ("add_special", "with_pieces"):
            if getattr(self, name):
                raise UserError(f"{name} is only allowed together with content", param=name)
        if (self.prompt is None) == (self.messages is None):
            raise UserError("give either prompt or messages", param="prompt")
        if self.messages is not None:
            check_continuation(self.add_generation_prompt, self.continue_final_message, self.messages)
            return
        for name in _OF_MESSAGES:
            if getattr(self, name):
                raise UserError(f"{name} is only allowed together with messages", param=name)

    @property
    def template_inputs(self) -> TemplateInputs:
        media = (self.mm_processor_kwargs, self.media_io_kwargs)
        return TemplateInputs(self.documents, self.chat_template, {}, *media)

    @property
    def special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestStruct, kw_only=True, frozen=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    """Answer of /detokenize. prompt, content: two names of the text, vLLM's and llama.cpp's."""

    prompt: str
    content: str
