"""Constraints on a request's text. Names and meanings are vLLM's, except `start_after_token_ids` and `preamble`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import UserError

MAX_CHOICES = 4096
MAX_START_TOKENS = 64
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Preamble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the text before the constrained one. format: its structural-tag format. tokens: marks in it -> ids, for
    marks that the model writes as one token, besides special tokens."""

    format: dict[str, Any]
    tokens: dict[str, int] = {}


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint on a request's text: exactly one of the first six fields. Invalid values raise UserError.

    json: JSON schema, as an object or text. regex: pattern for the whole text (Rust's syntax: no look-around). choice:
    allowed texts. grammar: Lark's syntax, or EBNF (`root ::= ...`). structural_tag: tagged parts that follow schemas,
    as an object or text. disable_any_whitespace: no blanks between parts of JSON. whitespace_pattern: regular
    expression for those blanks. disable_additional_properties: objects have only properties that the schema names.
    start_after_token_ids: generated tokens after which the constraint begins; empty or None: at once. preamble: form of
    a text that comes first (thoughts and their end mark, or nothing).
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    start_after_token_ids: list[int] | None = None
    preamble: Preamble | None = None

    @property
    def size(self) -> int:
        """Characters of the constraint; for an object, about one per character."""
        value = next(getattr(self, name) for name in CONSTRAINTS if getattr(self, name) not in (None, False))
        size, pieces = 0, [value]
        while pieces:
            piece = pieces.pop()
            if isinstance(piece, dict):
                pieces += piece.values()
                size += sum([len(str(key)) for key in piece])
            elif isinstance(piece, list | tuple):
                pieces += piece
            size += len(piece) if isinstance(piece, str) else 1
        return size

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"not {' and '.join(given)}" if given else "and got none"
            raise _error(f"structured_outputs takes exactly one of {', '.join(CONSTRAINTS)}, {found}")
        for name in ("json", "structural_tag"):
            if not isinstance(getattr(self, name), str | dict | None):
                raise _error(f"{name} must be an object or its text, not {type(getattr(self, name)).__name__}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise _error(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _error(f"{name} must be true or false, not {getattr(self, name)!r:.100}")
        if self.choice is not None:
            _check_choice(self.choice)
        _check_start(self.start_after_token_ids)
        if not isinstance(self.preamble, Preamble | None):
            raise _error(f"preamble must be a Preamble, not {type(self.preamble).__name__}")


def _check_choice(choice: object) -> None:
    if not isinstance(choice, list | tuple) or not all(isinstance(text, str) and text for text in choice):
        raise _error("choice must be a list of non-empty strings")
    if not 0 < len(choice) <= MAX_CHOICES:
        raise _error(f"choice must have between 1 and {MAX_CHOICES} entries, not {len(choice)}")


def _check_start(token_ids: object) -> None:
    if token_ids is None:
        return
    if not isinstance(token_ids, list | tuple) or not all(type(each) is int and each >= 0 for each in token_ids):
        raise _error("start_after_token_ids must be a list of token ids")
    if len(token_ids) > MAX_START_TOKENS:
        raise _error(f"start_after_token_ids must have at most {MAX_START_TOKENS} entries, not {len(token_ids)}")


def _error(message: str) -> UserError:
    return UserError(message, param="structured_outputs")
