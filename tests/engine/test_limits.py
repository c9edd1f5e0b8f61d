"""What a request may bring: ids that the model has, and lists that stay small however often a request has them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.input_processor import InputProcessor, num_units
from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.build import byte_level

CONTEXT = 64


@pytest.fixture
def tokenizer() -> Tokenizer:
    return byte_level()


def make(tokenizer: Tokenizer, vocab_size: int, **more: Any) -> InputProcessor:
    options: dict[str, Any] = {"max_model_len": CONTEXT, "eos_token_ids": [1], "seed": 0} | more
    return InputProcessor(tokenizer, vocab_size=vocab_size, **options)


def added(tokenizer: Tokenizer) -> int:
    """The id of a token that the tokenizer has and a smaller model has not."""
    (token_id,) = tokenizer.encode("日本")
    return token_id


def test_a_text_whose_token_the_model_does_not_have_is_refused(tokenizer: Tokenizer) -> None:
    token_id = added(tokenizer)
    processor = make(tokenizer, token_id)
    for prompt in ("日本", "the 日本 fox", {"prompt": "日本"}):
        with pytest.raises(UserError, match=f"token {token_id} of the tokenizer; the model has no such") as caught:
            processor.process("r", prompt, SamplingParams())
        assert caught.value.param == "prompt"
        with pytest.raises(UserError, match="the model has no such token"):
            processor.process_prefix("p", prompt)
        with pytest.raises(UserError, match="the model has no such token"):
            processor.process("r", prompt, SamplingParams(use_beam_search=True, n=2))
    assert processor.process("r", "the fox", SamplingParams()).prompt_token_ids
    assert make(tokenizer, token_id + 1).process("r", "日本", SamplingParams()).prompt_token_ids == [token_id]


def test_end_tokens_that_the_model_does_not_have_are_left_out(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer, 300, eos_token_ids=[1, 300, 10**9, -1, 299])
    assert processor.process("r", [5], SamplingParams(min_tokens=2)).eos_token_ids == [1, 299]


def test_bad_words_that_the_model_cannot_produce_are_left_out(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer, added(tokenizer))
    assert processor.process("r", [5], SamplingParams(bad_words=["日本", "the 日本"])).bad_token_sequences == []
    assert processor.process("r", [5], SamplingParams(bad_words=["日本", "t"])).bad_token_sequences


def test_lists_of_ids_hold_each_id_once() -> None:
    params = SamplingParams(allowed_token_ids=[9] * 2**20, stop_token_ids=[3, 4, 3])
    assert params.allowed_token_ids == [9]
    assert params.stop_token_ids == [3, 4]
    assert SamplingParams(allowed_token_ids=[2, 1]).allowed_token_ids == [2, 1]


@pytest.mark.parametrize("values", [[True], [1.0], ["1"], [-1], [2**63], [None], [[1]]])
def test_wrong_ids_are_found_in_long_lists(values: list[Any]) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(allowed_token_ids=[5] * 1000 + values)
    assert caught.value.param == "allowed_token_ids"


def test_bad_words_are_tokenised_once_for_all_prompts_of_a_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    encode_batch = Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        calls.append(texts)
        return encode_batch(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    processor = make(tokenizer, 400)
    params = SamplingParams(bad_words=["fox", "dog"], n=8)
    requests = [processor.process(str(number), [5, number], params) for number in range(100)]
    assert calls == [["fox", " fox", "dog", " dog"]]
    assert all(request.bad_token_sequences is requests[0].bad_token_sequences for request in requests)
    words = ["cat"]
    other = processor.process("r", [5], SamplingParams(bad_words=words)).bad_token_sequences
    words[0] = "cow"
    assert processor.process("r", [5], SamplingParams(bad_words=words)).bad_token_sequences != other


def test_bad_words_have_a_limit_before_they_are_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = make(tokenizer, 400)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(UserError, match="must not exceed 16384 characters together, and have 1024000") as caught:
        processor.process("r", [5], SamplingParams(bad_words=["x" * 1000] * 1024))
    assert caught.value.param == "bad_words"


def test_bad_words_have_a_limit_of_tokens(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer, 400)
    with pytest.raises(UserError, match=r"must not exceed 8192 tokens together, and have \d+ ") as caught:
        processor.process("r", [5], SamplingParams(bad_words=["語" * 16] * 1000))
    assert caught.value.param == "bad_words"


def test_what_is_read_of_a_request_is_counted() -> None:
    params = SamplingParams(allowed_token_ids=[1, 2], stop_token_ids=[3], logit_bias={1: 1.0}, bad_words=["abc", "de"])
    assert num_units("abcd", params) == 4 + 2 + 1 + 1 + 5
    assert num_units([1, 2, 3], SamplingParams()) == num_units({"prompt_token_ids": [1, 2, 3]}, SamplingParams()) == 3
    assert num_units({"prompt": "abc"}, SamplingParams()) == 3
    assert num_units({}, SamplingParams()) == 0
