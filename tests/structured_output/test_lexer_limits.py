"""Expressions that count, as `(\\S+\\s+){0,199}` does: copies of a matcher share llguidance's lexer and its limits."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.structured_output import mask_process
from quire.structured_output.grammar import write_grammar
from quire.structured_output.mask_process import Compiled, consume_here
from quire.structured_output.messages import Grammar
from quire.structured_output.sequence_state import MaskShape, SequenceState
from quire.structured_outputs_params import StructuredOutputsParams
from tests.structured_output.bytes_matcher import VOCABULARY, takes

COUNTED = (
    {"type": "string", "pattern": r"^(?:\S+\s+){0,199}\S+$", "maxLength": 600},
    {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "maxLength": 500},
    {"type": "array", "items": {"type": "string", "pattern": r"^(?:\S+\s+){0,29}\S+$", "maxLength": 300}},
    {"type": "string", "pattern": r"^(\w+\s?){0,200}$", "maxLength": 1000},
)
TEXTS = ("word " * 25 + "x", "a b " * 12 + "a", "x" * 250)


def compiled(schema: object) -> Compiled:
    text = write_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True))  # type: ignore[arg-type]
    return Compiled(Grammar(0, text, 0.0, 0.0))


@pytest.mark.parametrize("schema", COUNTED)
def test_tokens_without_masks_between_them(schema: dict[str, object]) -> None:
    """All tokens of a sequence come at once where its matcher is made anew."""
    grammar = compiled(schema)
    for text in TEXTS:
        tokens = (f'["{text}","{text}"]' if "items" in schema else f'"{text}"').encode()
        sequence = SequenceState(grammar.start(VOCABULARY), MaskShape.of(256, ()))
        assert sequence.accept(tokens, consume_here) == len(tokens)


def test_a_grammar_whose_lexer_has_failed_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are those of all sequences that share it."""

    def with_few_states(vocabulary: LLTokenizer, text: str) -> LLMatcher:
        return LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(max_lexer_states=400))

    monkeypatch.setattr(mask_process, "start_matcher", with_few_states)
    grammar = compiled(COUNTED[0])
    failed = grammar.start(VOCABULARY)
    assert not takes(failed, f'"{TEXTS[0]}"')
    assert not takes(grammar.start(VOCABULARY), '"a"')  # a copy shares what has failed
    grammar.check()
    assert takes(grammar.start(VOCABULARY), '"a"')
    same = grammar.start(VOCABULARY)
    grammar.check()
    assert takes(same, '"a"')
