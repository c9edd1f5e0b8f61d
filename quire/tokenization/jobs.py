"""Messages to and from helper processes. Bytes follow a Render (messages), a Read (body) and its answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

MAX_SETUP_BYTES = 16 * 2**20
MAX_JOB_BYTES = 2**40
READ_SECONDS = 10.0
"""Processor time for one body in a helper, in seconds, enforced by the system."""
TEXT_SECONDS = 10.0
CHARACTER_SECONDS = 1e-4
"""Processor time for a text and each of its characters, in seconds: 50 times the usual."""
PIECE_TOKENS = 2**16
"""Number of ids converted to Python integers at a time. Other threads run in between."""

RESERVED_OPTIONS = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "tokenizer", "truncation", "padding", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now", "range", "dict", "lipsum",
    "cycler", "joiner", "namespace",
))  # fmt: skip
"""Names that template options may not take: set elsewhere, used by Transformers' own method, or functions of every
template."""


class TemplateLimits(msgspec.Struct, frozen=True):
    """Limits of one rendering; the system enforces the first three, the parent also `seconds`.

    cpu_seconds: processor time, with compilation. seconds: wall time, without the process's start. memory: further
        bytes of address space (Linux only). queue_seconds: maximum wait for a turn.
    """

    cpu_seconds: float = 2.0
    seconds: float = 10.0
    memory: int = 512 * 2**20
    queue_seconds: float = 30.0

    @property
    def max_conversation_bytes(self) -> int:
        return self.memory // 8


class ReadLimits(msgspec.Struct, frozen=True):
    """Limits of one Read, enforced by the system. seconds: processor time. memory: further bytes of address space after
    the reader's import (Linux only; None: no limit). what: name of the bytes in errors. param: field with them."""

    seconds: float = READ_SECONDS
    memory: int | None = None
    what: str = "the request body"
    param: str | None = None


BODY_LIMITS = ReadLimits()


class TokenizerSource(msgspec.Struct, frozen=True):
    """Source of the engine's tokenizer for a helper. options: EngineOptions as JSON. vocab_size: the model's.
    sample_ids: packed ids of SAMPLE, which identify it; None if it cannot encode that."""

    options: bytes
    vocab_size: int
    sample_ids: bytes | None


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message to a helper. templates: name -> Jinja source. special_tokens: template variables. tokenizer: None
    if texts are not tokenized."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    limits: TemplateLimits
    tokenizer: TokenizerSource | None = None


class Tokenising(msgspec.Struct, frozen=True):
    """Settings for tokenizing a rendered text. inline_characters: maximum length of a text that returns untokenized.
    max_model_len: in tokens; a far longer text is refused first."""

    inline_characters: int
    add_special_tokens: bool
    max_model_len: int


class Render(msgspec.Struct, frozen=True, tag=True):
    """Conversation to render; its messages follow, as msgpack of a list of Message. template: name in Setup.templates,
    unless `source` has one. now: result of `strftime_now`. max_characters: limit of the text. tokenising: None for text
    only."""

    template: str
    variables: dict[str, Any]
    now: datetime
    max_characters: int
    content_format: str = "auto"
    source: str | None = None
    continue_final_message: bool = False
    tokenising: Tokenising | None = None


class Text(msgspec.Struct, frozen=True, tag=True):
    """Text to tokenize. seconds: limit of processor time."""

    text: str
    add_special_tokens: bool
    seconds: float


class Read(msgspec.Struct, frozen=True, tag=True):
    """Bytes, which follow, for `reader` ("module:name"), a function of `argument` and the bytes that returns bytes.
    limits: of this job."""

    reader: str
    argument: str
    limits: ReadLimits


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Render. is_long: the token ids follow, as for a Text."""

    text: str
    is_long: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Render that failed. kind: the template does not compile, refuses the messages (`raise_exception`) or
    raised; the last message cannot be continued; text, memory or time exceeded the limit. reason: one line for the
    first four."""

    kind: Literal["invalid", "refused", "failed", "continued", "length", "memory", "time"]
    reason: str = ""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Text. ids: packed by `packed`."""

    ids: bytes


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Read; the reader's result follows."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Failure of a Text or Read. error: name of a class in quire.errors."""

    error: str
    message: str
    param: str | None = None


Answer = Rendered | Failed | Encoded | Answered | Refused


def seconds_of(text: str) -> float:
    return TEXT_SECONDS + CHARACTER_SECONDS * len(text)


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as 4 bytes each, in native order."""
    return array("I", ids).tobytes()


def listed(ids: bytes) -> list[int]:
    """Unpack `packed` ids. Other threads run in between."""
    numbers = memoryview(ids).cast("I")
    token_ids: list[int] = []
    for start in range(0, len(numbers), PIECE_TOKENS):
        token_ids += numbers[start : start + PIECE_TOKENS].tolist()
    return token_ids
