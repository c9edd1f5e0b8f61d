"""What is compared, over a vocabulary of bytes: this project's constraints, llguidance alone, and xgrammar where it is
installed (0.2.8 was; no part of this project needs it)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, cast

from llguidance import LLMatcher, LLTokenizer

from quire.errors import UserError
from quire.structured_output.grammar import write_grammar
from quire.structured_output.rehearsal import start_matcher
from quire.structured_outputs_params import StructuredOutputsParams

VOCABULARY = LLTokenizer("byte")
NUM_BYTES = 256
XGRAMMAR = "xgrammar"
_LOG_HEAD = re.compile(r"^\[[0-9:]+\] \S+ ")
"""The time and the place before xgrammar's messages."""


class ByteMatcher(Protocol):
    """The part of llguidance's LLMatcher that the benchmark uses. Tokens are bytes."""

    def compute_bitmask(self) -> Any:
        """At least 256 bits, the least significant of each byte first; valid until the next call."""

    def consume_token(self, token: int) -> bool: ...

    def deep_copy(self) -> ByteMatcher: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


def quire(schema: Any) -> ByteMatcher:
    """Raises ValueError for what is refused."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        grammar = write_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    except UserError as error:
        raise ValueError(error.message) from None
    return _checked(start_matcher(VOCABULARY, grammar))


def llguidance(schema: Any) -> ByteMatcher:
    """Raises ValueError for what is refused."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    return _checked(LLMatcher(VOCABULARY, grammar, log_level=0))


def _checked(matcher: LLMatcher) -> ByteMatcher:
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return cast(ByteMatcher, matcher)


class XgrammarMatcher:
    """A matcher of xgrammar. Bytes that it does not take leave it as it was."""

    def __init__(self, matcher: Any) -> None:
        import xgrammar

        self._matcher = matcher
        self._bits = xgrammar.allocate_token_bitmask(1, NUM_BYTES + 1)
        self._bytes = memoryview(self._bits.numpy()).cast("B")

    def compute_bitmask(self) -> memoryview:
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bytes

    def consume_token(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def deep_copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._matcher.fork())

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


def xgrammar(schema: Any) -> ByteMatcher:
    """In its mode that allows properties that are not named, and blanks: without them it writes some behind commas.
    Raises ValueError for what is refused."""
    from xgrammar import GrammarMatcher

    try:
        grammar = _xgrammar_compiler().compile_json_schema(json.dumps(schema), strict_mode=False)
        return XgrammarMatcher(GrammarMatcher(grammar))
    except Exception as error:  # its own classes, which are no ValueErrors
        raise ValueError(_LOG_HEAD.sub("", str(error))) from None


@cache
def _xgrammar_compiler() -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo

    vocabulary = [bytes([each]) for each in range(NUM_BYTES)] + [b""]
    return GrammarCompiler(TokenizerInfo(vocabulary, stop_token_ids=[NUM_BYTES]), max_threads=1, cache_enabled=False)


ENGINES: dict[str, Callable[[Any], ByteMatcher]] = {"quire": quire, "llguidance": llguidance, XGRAMMAR: xgrammar}


def installed() -> list[str]:
    """The engines that can be measured here."""
    return [name for name in ENGINES if name != XGRAMMAR or find_spec(XGRAMMAR) is not None]
