"""Messages of llguidance from which the project tells what happened, because it has no codes for that: a version whose
words differ fails here."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from quire.structured_output.grammar import write_grammar
from quire.structured_output.mask_process import ConsumeApart, consume_here
from quire.structured_output.rehearsal import ONE_OF, in_one_line, outcome_of, start_matcher
from quire.structured_output.sequence_state import NOT_ALLOWED, MaskShape, SequenceState
from quire.structured_outputs_params import StructuredOutputsParams
from tests.structured_output.bytes_matcher import VOCABULARY

TOKENS = (
    b"b",
    b"b" * 600,
    b'a" is not allowed',
    b"\\",
    b'\\"',
    b"\n" * 300 + b"b",
    "é".encode(),
    b"\xff\xfe",
    b"\x00",
)


class FewTokens:
    """A tokenizer for llguidance."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = [b"</s>", b"a", *tokens]
        self.special_token_ids = [0]
        self.eos_token_id = 0
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        return [self.tokens.index(bytes([byte])) for byte in data if bytes([byte]) in self.tokens]


def vocabulary_of(*tokens: bytes) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(FewTokens(*tokens)), n_vocab=2 + len(tokens))


def sequence_of(vocabulary: LLTokenizer, size: int, grammar: str) -> SequenceState:
    return SequenceState(start_matcher(vocabulary, grammar), MaskShape.of(size, [0]))


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_that_is_not_allowed_is_no_failure(token: bytes) -> None:
    sequence = sequence_of(vocabulary_of(token), 3, LLMatcher.grammar_from_regex("a+(c|d)"))
    assert sequence.accept([1, 1, 2], consume_here) == 2
    assert sequence.failure == ""


GRAMMARS = (
    {"regex": "a+"},
    {"choice": ["a", "aaa"]},
    {"json": {"enum": ["a"]}},
    {"json_object": True},
    {"grammar": 'root ::= "a" root | "aa"'},
)


@pytest.mark.parametrize("fields", GRAMMARS)
@pytest.mark.parametrize("byte", b"z\x00\xff\n")
def test_no_kind_of_constraint_takes_it_for_a_failure(fields: dict[str, object], byte: int) -> None:
    text = write_grammar(StructuredOutputsParams(**fields))  # type: ignore[arg-type]
    for consume in (consume_here, ConsumeApart(VOCABULARY)):
        for token in (byte, VOCABULARY.eos_token):
            sequence = sequence_of(VOCABULARY, 256, text)
            if sequence.accept([token], consume) == 0:  # JSON may begin with a line feed
                assert sequence.failure == ""


def test_what_the_library_gives_up_at_is_a_failure() -> None:
    many = 'start: (a | b)*\na: "a" a | "a"\nb: "a" b | "a" | b b'
    limits = LLParserLimits(max_items_in_row=50, verbose_errors=False)
    state = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(many), log_level=0, limits=limits)
    sequence = SequenceState(state, MaskShape.of(256, ()))
    assert sequence.accept(b"a" * 50, consume_here) < 50
    assert "items" in sequence.failure


def test_a_token_behind_the_vocabulary_is_a_failure() -> None:
    sequence = sequence_of(VOCABULARY, 256, LLMatcher.grammar_from_regex("a+"))
    assert sequence.accept([10**6], consume_here) == 0
    assert "out of range" in sequence.failure


@pytest.mark.parametrize(
    "reason",
    [
        "lexer error: token doesn't satisfy the grammar; ",
        'Parser Error: max "a" doesn\'t satisfy the grammar; ',
        'Parser Error: token "a" and "b" doesn\'t satisfy the grammar; ',
    ],
)
def test_words_of_a_client_make_no_failure_a_token(reason: str) -> None:
    assert NOT_ALLOWED.match(reason) is None


def test_a_text_that_no_token_continues() -> None:
    outcome = outcome_of(vocabulary_of(b"b"), LLMatcher.grammar_from_regex("ac"))
    assert outcome.reason == ""  # others may follow the first token
    assert outcome_of(vocabulary_of(b"b"), LLMatcher.grammar_from_regex("c")).reason == (
        "no token of this model continues the text"
    )


def test_schemas_of_one_of_that_overlap() -> None:
    grammar = LLMatcher.grammar_from_json_schema('{"oneOf": [{"type": "number"}, {"type": "integer"}]}')
    state = start_matcher(VOCABULARY, grammar)
    assert state.is_error()
    assert in_one_line(state.get_error()) == ONE_OF
