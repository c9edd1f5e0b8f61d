"""Increments concatenate to the whole text, for every kind of decoder and any tokens."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.tokenization.detokenizer import MAX_HELD_TOKENS, PROMPT_TAIL
from quire.tokenization.pieces import BytePieces, LocalPieces, WholePieces
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.build import BUILDERS, CORPUS

REPLACEMENT = "\ufffd"
KINDS = {
    "byte_level": BytePieces,
    "sentencepiece": LocalPieces,
    "sentencepiece_unstripped": LocalPieces,
    "wordpiece": LocalPieces,
    "metaspace": LocalPieces,
    "undecoded": LocalPieces,
    "suffixed": WholePieces,
    "mixed": WholePieces,
}


@cache
def build(kind: str) -> Tokenizer:
    return BUILDERS[kind]()


def increments(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@st.composite
def tokens(draw: st.DrawFn, kind: str, max_size: int = 40) -> list[int]:
    """Ids of a tokenizer, a few unknown ones among them."""
    return draw(st.lists(st.integers(0, build(kind).vocab_size + 1), max_size=max_size))


@pytest.mark.parametrize("kind", BUILDERS)
def test_kind_of_decoder_is_recognised(kind: str) -> None:
    assert type(build(kind).pieces) is KINDS[kind]


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind != "mixed"])
@given(data=st.data(), skip=st.booleans())
def test_increments_concatenate_to_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = build(kind)
    ids = data.draw(tokens(kind))
    assert "".join(increments(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece", "metaspace", "undecoded", "suffixed"])
@given(data=st.data(), skip=st.booleans())
def test_the_whole_is_what_the_library_decodes(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = build(kind)
    ids = data.draw(tokens(kind))
    assert "".join(increments(tokenizer, ids, skip)) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_unstripped"])
@given(words=st.lists(st.one_of(st.text(max_size=3), st.sampled_from(["\n", " ", " the", "é", "\U0001f999"]))))
def test_sentencepiece_text_is_what_the_library_decodes(kind: str, words: list[str]) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode("".join(words))
    assert "".join(increments(tokenizer, ids)) == tokenizer.backend.decode(ids, skip_special_tokens=True)


@given(run=st.binary(min_size=1, max_size=12))
@example(run=b"\n\xf0\x9f")
@example(run=b"\xf0\x9f\xa6\x99\xff\xe6")
@example(run=b"\xe0\x80\xed\xa0\x80")
def test_invalid_byte_runs_keep_their_valid_characters(run: bytes) -> None:
    """Valid characters stay, each other byte is one U+FFFD (the library would drop the valid ones of the run too)."""
    tokenizer = build("sentencepiece")
    a = tokenizer.token_to_id("a")
    ids = [a, *(3 + byte for byte in run), a]
    expected = "a" + run.decode(errors="surrogateescape") + "a"
    expected = "".join(REPLACEMENT if "\udc80" <= char <= "\udcff" else char for char in expected)
    assert "".join(increments(tokenizer, ids)) == tokenizer.decode(ids) == expected


def test_a_newline_byte_is_shown_at_once() -> None:
    tokenizer = build("sentencepiece")
    newline = tokenizer.token_to_id("<0x0A>")
    assert increments(tokenizer, [newline, newline])[:2] == ["\n", "\n"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_split_character_is_held_back_until_complete(kind: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode("\U0001d11e", add_special_tokens=False)[-4:]
    assert len(ids) == 4
    assert increments(tokenizer, ids) == ["", "", "", "\U0001d11e", ""]


@pytest.mark.parametrize(("kind", "expected"), [("byte_level", REPLACEMENT), ("sentencepiece", 3 * REPLACEMENT)])
def test_an_unfinished_character_is_released_at_the_end(kind: str, expected: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode("\U0001d11e", add_special_tokens=False)[-4:-1]
    assert increments(tokenizer, ids) == ["", "", "", expected]
    assert tokenizer.backend.decode(ids) == expected


def test_byte_tokens_interrupted_by_a_word() -> None:
    tokenizer = build("sentencepiece")
    ids = [tokenizer.token_to_id(piece) for piece in ("<0xE6>", "<0x97>", "▁the")]
    assert increments(tokenizer, ids) == ["", "", 2 * REPLACEMENT + " the", ""]


def test_unknown_and_skipped_tokens_do_not_interrupt_a_character() -> None:
    tokenizer = build("sentencepiece")
    e6, x97, xa5 = (tokenizer.token_to_id(piece) for piece in ("<0xE6>", "<0x97>", "<0xA5>"))
    assert increments(tokenizer, [e6, 99_999, x97, 2, xa5]) == ["", "", "", "", "日", ""]


@given(text=st.text(max_size=30))
def test_byte_level_increments_never_end_inside_a_character(text: str) -> None:
    """Each increment of a valid text is a prefix of what is left of it."""
    tokenizer = build("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    rest = text
    for piece in increments(tokenizer, ids, skip=False):
        assert rest.startswith(piece)
        rest = rest[len(piece) :]
    assert rest == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece", "metaspace", "undecoded", "suffixed"])
@given(data=st.data())
def test_a_completion_reads_as_the_continuation_of_its_prompt(kind: str, data: st.DataObject) -> None:
    """What the prompt shows and what the completion shows is the text of both together."""
    tokenizer = build(kind)
    prompt, ids = data.draw(tokens(kind, PROMPT_TAIL)), data.draw(tokens(kind))
    shown = tokenizer.detokenizer().append(prompt)
    whole = tokenizer.decode(prompt + ids)
    assert shown + "".join(increments(tokenizer, ids, prompt=prompt)) == whole


def test_a_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_start() -> None:
    tokenizer = build("sentencepiece")
    the = tokenizer.token_to_id("▁the")
    assert increments(tokenizer, [the], prompt=[the]) == [" the", ""]
    assert increments(tokenizer, [the], prompt=[tokenizer.bos_token_id]) == ["the", ""]


def test_a_prompt_longer_than_the_tail_counts_as_text() -> None:
    tokenizer = build("sentencepiece")
    the = tokenizer.token_to_id("▁the")
    assert increments(tokenizer, [the], prompt=[the] * (PROMPT_TAIL + 5)) == [" the", ""]


def alphabet_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token of `mixed` that stands for one byte."""
    byte_level = build("byte_level")
    names = [name for name in byte_level.backend.get_vocab() if len(name) == 1]
    found = [name for name in names if byte_level.token_bytes(byte_level.token_to_id(name)) == bytes([byte])]
    token_id = tokenizer.token_to_id(found[0])
    assert token_id is not None
    return token_id


def test_whole_sequence_decoders_hold_back_a_bounded_number_of_tokens() -> None:
    """Text that never becomes valid does not stall the stream, nor make it decode ever longer windows."""
    tokenizer = build("mixed")
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.push(alphabet_id(tokenizer, 0xF0)) for _ in range(3 * MAX_HELD_TOKENS)]
    assert sum(1 for text in shown if text) >= 2
    assert "".join(shown) + detokenizer.flush() == REPLACEMENT * len(shown)


def test_whole_sequence_decoders_complete_a_character_that_the_prompt_began() -> None:
    tokenizer = build("mixed")
    ids = [alphabet_id(tokenizer, byte) for byte in "x日".encode()]
    assert increments(tokenizer, ids[2:], prompt=ids[:2]) == ["", "日", ""]


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_whole_sequence_decoders_stream_valid_text(text: str) -> None:
    tokenizer = build("mixed")
    byte_level = build("byte_level")
    ids = []
    for token_id in byte_level.encode(text, add_special_tokens=False):
        for char in byte_level.backend.id_to_token(token_id):
            ids.append(tokenizer.token_to_id(char))
    assert "".join(increments(tokenizer, ids)) == text.replace("!", "?")


def test_cost_does_not_grow_with_the_text() -> None:
    """A whole-sequence decoder is asked for short windows only."""
    tokenizer = build("suffixed")
    asked: list[int] = []

    class Counting(WholePieces):
        def decode(self, token_ids: list[int]) -> str:
            asked.append(len(token_ids))
            return super().decode(token_ids)

    tokenizer_pieces = tokenizer.pieces
    try:
        tokenizer.pieces = Counting(tokenizer.backend)
        increments(tokenizer, [1, 2, 3] * 200)
    finally:
        tokenizer.pieces = tokenizer_pieces
    assert max(asked) <= 4


def test_real_text_streams_exactly() -> None:
    tokenizer = build("byte_level")
    text = "".join(CORPUS)
    ids = tokenizer.encode(text)
    pieces = increments(tokenizer, ids)
    assert "".join(pieces) == text
    assert sum(1 for piece in pieces if piece) > len(ids) // 2
