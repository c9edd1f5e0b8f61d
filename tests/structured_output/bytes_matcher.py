"""Constraints over a vocabulary of single bytes: whether they take a text."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.structured_output.grammar import write_grammar
from quire.structured_output.rehearsal import start_matcher
from quire.structured_outputs_params import StructuredOutputsParams

VOCABULARY = LLTokenizer("byte")


def schema_matcher(schema: Any) -> LLMatcher:
    """Raises UserError for what is refused. JSON without blanks."""
    return matcher(write_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True)))


def matcher(grammar: str) -> LLMatcher:
    found = start_matcher(VOCABULARY, grammar)
    assert not found.is_error(), found.get_error()
    return found


def takes(start: LLMatcher, text: str) -> bool:
    """Whether the text is whole. The matcher is left where it was, with what its lexer has worked out."""
    tokens = list(text.encode())
    if start.validate_tokens(tokens) < len(tokens):
        return False
    assert start.consume_tokens(tokens), start.get_error()
    is_whole = start.is_accepting()
    assert start.rollback(len(tokens)), start.get_error()
    return is_whole
