"""What is compared: this project's constraints, and llguidance alone. Both over a vocabulary of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.errors import UserError
from quire.structured_output.grammar import write_grammar
from quire.structured_output.rehearsal import start_matcher
from quire.structured_outputs_params import StructuredOutputsParams

VOCABULARY = LLTokenizer("byte")


def quire(schema: Any) -> LLMatcher:
    """Raises ValueError for what is refused."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        grammar = write_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    except UserError as error:
        raise ValueError(error.message) from None
    return _checked(start_matcher(VOCABULARY, grammar))


def llguidance(schema: Any) -> LLMatcher:
    """Raises ValueError for what is refused."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    return _checked(LLMatcher(VOCABULARY, grammar, log_level=0))


def _checked(matcher: LLMatcher) -> LLMatcher:
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


ENGINES: dict[str, Callable[[Any], LLMatcher]] = {"quire": quire, "llguidance": llguidance}
