"""Bodies of llama.cpp's POST /chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import UserError
from quire.server.protocol.chat import UNSUPPORTED_CHAT_FIELDS, ChatChunk, ChatRequest, ChatResponse
from quire.server.protocol.common import Int32
from quire.server.protocol.foreign import NO_EFFECT
from quire.server.protocol.llama_cpp import BOTH, CHANGES_ANSWER, IDLE, NOTED, RANDOM_SEED, SAMPLING, LlamaTimings
from quire.server.protocol.structured import ConstraintText

OWN = frozenset({"grammar", "json_schema", "n_predict", "repeat_last_n", "repeat_penalty"})


class LlamaChatRequest(ChatRequest, kw_only=True, frozen=True):
    """Chat completion with fields of LlamaFields."""

    grammar: ConstraintText = ""
    json_schema: dict[str, Any] | None = None
    n_predict: Int32 | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int32 | None = None

    TAKES_EMPTY_TOOLS: ClassVar[bool] = True
    NOTED: ClassVar[frozenset[str]] = NOTED
    NO_EFFECT: ClassVar[frozenset[str]] = (NO_EFFECT - NOTED) | IDLE
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        name: values for name, values in (UNSUPPORTED_CHAT_FIELDS | CHANGES_ANSWER).items() if name not in OWN | NOTED
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grammar and self.json_schema is not None:
            raise UserError(BOTH, param="grammar")

    @property
    def with_tools(self) -> ChatRequest:
        found = super().with_tools
        if found.tools != []:
            return found
        choice = None if found.tool_choice == "auto" else found.tool_choice
        return msgspec.structs.replace(found, tools=None, tool_choice=choice)

    @property
    def noted(self) -> list[str]:
        """See LlamaFields.noted."""
        return ["repeat_last_n"] if (self.repeat_last_n or 0) > 0 else []

    @property
    def constraint_field(self) -> str:
        if self.json_schema is not None:
            return "json_schema"
        return "grammar" if self.grammar else super().constraint_field

    def _options(self) -> list[dict[str, Any]]:
        own = {"grammar": self.grammar or None, "json": self.json_schema}
        return [*super()._options(), {name: value for name, value in own.items() if value is not None}]

    @property
    def names(self) -> dict[str, str]:
        own = "n_predict" if self.n_predict is not None and self.max_tokens == self.n_predict else "max_tokens"
        return {"max_tokens": own, **super().names, "repetition_penalty": "repeat_penalty"}

    @property
    def _limit(self) -> tuple[str, int | None]:
        names = ("max_completion_tokens", "max_tokens", "n_predict")
        given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        return given[0] if given else ("max_tokens", None)

    def settled(self, defaults: Mapping[str, Any]) -> LlamaChatRequest:
        """Request in OpenAI's fields. defaults: the model's."""
        absent = [name for name in SAMPLING if getattr(self, name) is None and name not in defaults]
        changes: dict[str, Any] = {name: SAMPLING[name] for name in absent}
        if self.repeat_penalty is not None and self.repeat_last_n != 0:
            changes["repetition_penalty"] = self.repeat_penalty
        if self.seed is not None and (self.seed < 0 or self.seed == RANDOM_SEED):
            changes["seed"] = None
        name, limit = self._limit
        if limit is not None:
            changes |= {name: None} if limit < 0 else {"max_completion_tokens": None, "max_tokens": limit}
        return msgspec.structs.replace(self, **changes)


class LlamaChatResponse(ChatResponse, kw_only=True):
    timings: LlamaTimings


class LlamaChatChunk(ChatChunk, kw_only=True):
    """timings: set in the last chunk."""

    timings: LlamaTimings | UnsetType = UNSET


class LlamaBeginDelta(msgspec.Struct):
    """Start of a streamed message."""

    role: str
    content: None = None


class LlamaBegin(msgspec.Struct):
    index: int
    delta: LlamaBeginDelta
    finish_reason: None = None
