"""What a helper process is told, and what it answers. A Render and a Read are followed by a frame of bytes, the
messages and the body; so is the answer to a Read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

MAX_SETUP_BYTES = 16 * 2**20
MAX_JOB_BYTES = 2**40
READ_SECONDS = 10.0
"""Seconds of processor time for one body in a helper process. The system ends the process then."""
TEXT_SECONDS = 10.0
CHARACTER_SECONDS = 1e-4
"""Processor time that a text has, and each of its characters: 50 times what tokenizers take."""
PIECE_TOKENS = 2**16
"""Of the ids that become Python integers at a time. Other threads run between two pieces."""

RESERVED_OPTIONS = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "tokenizer", "truncation", "padding", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now", "range", "dict", "lipsum",
    "cycler", "joiner", "namespace",
))  # fmt: skip
"""Names that are set elsewhere, mean something to Transformers' own method, or are the functions that every template
can call: no template option may take them."""


class TemplateLimits(msgspec.Struct, frozen=True):
    """What one rendering may take. The system enforces the first three, and the parent process the second once more.

    cpu_seconds: of processor time, compiling included. seconds: until the answer, start of the process not included.
    memory: bytes of address space besides those that the process has before (Linux only). queue_seconds: how long a
    conversation may wait for its turn.
    """

    cpu_seconds: float = 2.0
    seconds: float = 10.0
    memory: int = 512 * 2**20
    queue_seconds: float = 30.0

    @property
    def max_conversation_bytes(self) -> int:
        """A longer message is refused before it is sent: the process could not hold it together with its objects."""
        return self.memory // 8


class TokenizerSource(msgspec.Struct, frozen=True):
    """Where a helper finds the engine's tokenizer. options: EngineOptions as JSON. vocab_size: of the model.
    sample_ids: packed ids of SAMPLE, by which it is known again; None: the tokenizer cannot encode that."""

    options: bytes
    vocab_size: int
    sample_ids: bytes | None


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. templates: name -> Jinja source. special_tokens: in scope under their names. tokenizer: None
    where there is nothing to tokenise."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    limits: TemplateLimits
    tokenizer: TokenizerSource | None = None


class Tokenising(msgspec.Struct, frozen=True):
    """How the helper goes on with the text that it has rendered. inline_characters: of the longest text that comes back
    as it is. max_model_len: tokens; a text that has far more is refused before it is tokenised."""

    inline_characters: int
    add_special_tokens: bool
    max_model_len: int


class Render(msgspec.Struct, frozen=True, tag=True):
    """One conversation; its messages follow, as msgpack of a list of Message. template: a name of Setup.templates,
    unless `source` brings a template of its own. now: what `strftime_now` tells. max_characters: of the text.
    tokenising: None: the text alone is wanted."""

    template: str
    variables: dict[str, Any]
    now: datetime
    max_characters: int
    content_format: str = "auto"
    source: str | None = None
    continue_final_message: bool = False
    tokenising: Tokenising | None = None


class Text(msgspec.Struct, frozen=True, tag=True):
    """A text to tokenise. seconds: of processor time that it has."""

    text: str
    add_special_tokens: bool
    seconds: float


class Read(msgspec.Struct, frozen=True, tag=True):
    """Bytes, which follow, to be given to `reader`: as "module:name" a function of `argument` and them, which returns
    bytes."""

    reader: str
    argument: str


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """is_long: the token ids follow, as the answer to a Text."""

    text: str
    is_long: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A conversation without a text. kind: the template does not compile; it refuses the messages (`raise_exception`);
    it raised; the last message cannot be continued; the text is too long; the process ran out of memory or time.
    reason: for the first four, one line."""

    kind: Literal["invalid", "refused", "failed", "continued", "length", "memory", "time"]
    reason: str = ""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """ids: as `packed` has them."""

    ids: bytes


class Answered(msgspec.Struct, frozen=True, tag=True):
    """To a Read: what the reader returned follows."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No answer to a Text or a Read. error: the name of an error of quire.errors."""

    error: str
    message: str
    param: str | None = None


Answer = Rendered | Failed | Encoded | Answered | Refused


def seconds_of(text: str) -> float:
    """Seconds of processor time that a text has."""
    return TEXT_SECONDS + CHARACTER_SECONDS * len(text)


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as four bytes each in the machine's order."""
    return array("I", ids).tobytes()


def listed(ids: bytes) -> list[int]:
    """The ids of `packed`. Other threads run in between."""
    numbers = memoryview(ids).cast("I")
    token_ids: list[int] = []
    for start in range(0, len(numbers), PIECE_TOKENS):
        token_ids += numbers[start : start + PIECE_TOKENS].tolist()
    return token_ids
