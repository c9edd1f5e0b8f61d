"""Random JSON schemas, and a sampler that draws among the tokens of a mask alone."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.decoding.masks import ConstraintSpec
from quire.structured_output.mask_process import consume_here
from quire.structured_output.rehearsal import outcome_of, start_matcher
from quire.structured_output.sequence_state import MaskShape, SequenceState
from quire.structured_output.service import refusal
from quire.structured_output.vocabulary import make_vocabulary
from quire.structured_output.writer import GrammarWriter
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import Tokenizer

PATTERNS = ("^[a-z]{1,4}$", "^(foo|bar)+$", "^[A-Z][0-9]{2}-x$", "^.{0,3}$")
FORMATS = ("date", "time", "ipv4", "uuid")
NAMES = ("a", "b", "name", "x y", "größe", 'q"uote', "")
LITERALS = ("a", "b c", "", "ü", 0, -1, 2.5, True, None, [1, "x"], {"k": []})
LEAF = 4
"""The depth at which a schema has no parts."""
SOFT_LIMIT, HARD_LIMIT = 40, 400
"""Tokens of a text from which on the sampler tries to end it, and at which it gives up."""


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what llguidance supports; it may use `#/$defs/node` where `depth` is not 0."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "array", "anyOf"]
    if 0 < depth < LEAF:
        kinds.append("$ref")
    kind = rng.choice(kinds)
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "$ref":
        return {"$ref": "#/$defs/node"}
    return _MAKERS[kind](rng, depth)


def random_document(seed: int) -> dict[str, Any]:
    """A whole schema, with definitions."""
    rng = random.Random(seed)
    return random_schema(rng) | {"$defs": {"node": random_schema(rng, LEAF) | {"title": "leaf"}}}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    choice = rng.random()
    if choice < 0.2:
        schema["pattern"] = rng.choice(PATTERNS)
    elif choice < 0.4:
        schema["format"] = rng.choice(FORMATS)
    elif choice < 0.8:
        low = rng.randint(0, 3)
        schema |= {"minLength": low, "maxLength": low + rng.randint(0, 6)}
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    low = rng.randint(-200, 200)
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 300)
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rng.choice([False, False, {"type": "integer"}]),
    }
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 3)}
    schema["items"] = random_schema(rng, depth + 1)
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, depth + 1)]
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(LITERALS, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(LITERALS)}


_MAKERS = {
    "string": _string,
    "integer": _number,
    "number": _number,
    "object": _object,
    "array": _array,
    "anyOf": _any_of,
    "enum": _enum,
    "const": _const,
}


class LocalMatcher:
    """The state of a sequence as the mask process has it, in this process."""

    def __init__(self, state: SequenceState, shape: MaskShape) -> None:
        self._state = state
        self._shape = shape
        self._buffer = ctypes.create_string_buffer(shape.num_written)

    @property
    def is_finished(self) -> bool:
        return self._state.is_finished

    @property
    def ends_in_text(self) -> bool:
        return self._state.ends_in_text

    def accept(self, token_id: int) -> bool:
        return self._state.accept([token_id], consume_here) == 1

    def mask(self) -> bytes | None:
        if self._state.is_free:
            return None
        self._state.write_mask(memoryview(self._buffer).cast("B"), ctypes.addressof(self._buffer))
        return self._buffer.raw[: self._shape.num_bytes]

    def copy(self) -> LocalMatcher:
        return LocalMatcher(self._state.copy(), self._shape)


class Sampler:
    """Draws texts by masks alone, with the vocabulary of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.eos_token_ids = [token for token in tokenizer.ends(eos_token_ids) if token < self.vocab_size]
        self.writer = GrammarWriter(tokenizer, self.vocab_size)
        self.vocabulary = make_vocabulary(tokenizer, self.vocab_size, self.eos_token_ids)
        self._shape = MaskShape.of(self.vocab_size, self.eos_token_ids)
        sizes = [len(tokenizer.token_bytes(token)) for token in range(min(self.vocab_size, tokenizer.vocab_size))]
        self._closing = np.zeros(self.vocab_size, bool)
        for token in range(len(sizes)):
            text = tokenizer.token_bytes(token)
            self._closing[token] = text in (b'"', b"}", b"]", b"\n", b"0", b'"}', b'"]')
        self._closing[self.eos_token_ids] = True

    def compile(self, params: StructuredOutputsParams) -> str:
        """The text of a constraint. Raises UserError where a rehearsal refuses it."""
        text = self.writer.write(params)
        outcome = outcome_of(self.vocabulary, text)
        if outcome.reason:
            raise refusal(outcome.reason)
        return text

    def matcher(self, params: StructuredOutputsParams, spec: ConstraintSpec = ConstraintSpec()) -> LocalMatcher:  # noqa: B008
        state = start_matcher(self.vocabulary, self.compile(params))
        return LocalMatcher(SequenceState(state, self._shape, *spec), self._shape)

    def allowed(self, matcher: LocalMatcher) -> np.ndarray:
        """[n]: the tokens of a mask."""
        mask = matcher.mask()
        assert mask is not None
        assert len(mask) == 4 * -(-self.vocab_size // 32)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        assert len(allowed) > 0
        assert allowed[-1] < self.vocab_size
        return allowed

    def draw(self, params: StructuredOutputsParams, seed: int, begin: str = "") -> tuple[str, bool]:
        """(a text that begins with `begin`, whether the constraint was met to its end)."""
        rng, matcher = np.random.default_rng(seed), self.matcher(params)
        tokens = self.tokenizer.encode(begin, add_special_tokens=False)
        assert all(map(matcher.accept, tokens))
        while not matcher.is_finished and len(tokens) < HARD_LIMIT:
            allowed = self.allowed(matcher)
            closing = allowed[self._closing[allowed]]
            if len(tokens) > SOFT_LIMIT and len(closing):
                allowed = closing
            tokens.append(int(allowed[rng.integers(len(allowed))]))
            if not matcher.accept(tokens[-1]):
                matcher.mask()  # a UserError where llguidance gave up: a text too deep for its limits
                raise AssertionError(f"token {tokens[-1]} of a mask is not accepted")
        text = b"".join(self.tokenizer.token_bytes(token) for token in tokens if token not in self.eos_token_ids)
        return text.decode("utf-8", "surrogateescape"), matcher.is_finished
