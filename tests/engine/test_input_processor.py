"""Requests at the door: every form that is taken, everything that is refused, and what is resolved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.engine import input_processor
from quire.engine.input_processor import InputProcessor, Prompt, mix_seed, prompt_text
from quire.errors import PromptTooLongError, UserError
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.tokenization import text_lengths
from quire.tokenization.conversation import conversation_of
from quire.tokenization.tokenizer import Tokenizer
from tests.tokenization.build import SPECIAL, byte_level, byte_level_backend, sentencepiece, wordpiece

VOCABULARY = 400
CONTEXT = 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return make(tokenizer)


def make(tokenizer: Tokenizer | None, *, seed: int = 0, max_model_len: int = CONTEXT) -> InputProcessor:
    return InputProcessor(
        tokenizer, vocab_size=VOCABULARY, max_model_len=max_model_len, eos_token_ids=[1, 7], seed=seed
    )


def process(processor: InputProcessor, prompt: Any, **params: Any) -> EngineRequest:
    return processor.process("r", prompt, SamplingParams(**params))


def refused(processor: InputProcessor, prompt: Any, reason: str, param: str, **params: Any) -> UserError:
    with pytest.raises(UserError, match=reason) as caught:
        process(processor, prompt, **params)
    assert caught.value.param == param
    assert "\n" not in caught.value.message
    return caught.value


# -- prompts -------------------------------------------------------------------------------------------------


def test_text_and_tokens_in_every_form(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    for prompt in ("the fox", ids, tuple(ids), {"prompt": "the fox"}, {"prompt_token_ids": ids}):
        assert process(processor, prompt).prompt_token_ids == ids


def test_tokens_win_over_the_text_they_came_from(processor: InputProcessor) -> None:
    prompt: Prompt = {"prompt": "reported only", "prompt_token_ids": [5, 6]}
    assert process(processor, prompt).prompt_token_ids == [5, 6]
    assert prompt_text(prompt) == "reported only"
    assert [prompt_text("x"), prompt_text([1]), prompt_text({"prompt_token_ids": [1]})] == ["x", None, None]


def test_special_tokens_around_a_text() -> None:
    processor = make(sentencepiece())
    with_bos = processor.process("a", "the", SamplingParams()).prompt_token_ids
    without = processor.process("a", "the", SamplingParams(), add_special_tokens=False).prompt_token_ids
    assert with_bos == [1, *without]


def test_the_callers_list_is_not_kept(processor: InputProcessor) -> None:
    ids = [5, 6]
    request = process(processor, ids)
    ids.append(7)
    assert request.prompt_token_ids == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "reason", "param"),
    [
        ("", "the prompt is empty", "prompt"),
        ([], "the prompt is empty", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt_token_ids": []}, "the prompt is empty", "prompt"),
        (
            [3, VOCABULARY],
            rf"{VOCABULARY} is not a token id: out of vocabulary \(0 to 399\)",
            "prompt_token_ids",
        ),
        ([3, -1], "-1 is not a token id", "prompt_token_ids"),
        ([3, 2**80], "is not a token id", "prompt_token_ids"),
        ([3, "x"], "must hold integers, not 'x'", "prompt_token_ids"),
        ([3, True], "must hold integers, not True", "prompt_token_ids"),
        ([3, 4.0], r"must hold integers, not 4\.0", "prompt_token_ids"),
        ([3, None], "must hold integers, not None", "prompt_token_ids"),
        ([[3]], "must hold integers", "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "must be a list of integers", "prompt_token_ids"),
        ({"prompt_token_ids": None}, "must be a list of integers", "prompt_token_ids"),
        ({"prompt": 7}, "needs a string `prompt`", "prompt"),
        ({}, "needs a string `prompt`", "prompt"),
        (None, "not NoneType", "prompt"),
        (7, "not int", "prompt"),
        (b"bytes", "not bytes", "prompt"),
        ({"promt": "x"}, "unknown key in the prompt 'promt'; did you mean 'prompt'", "promt"),
        (
            {"prompt": "x", "multi_modal_data": {"image": 1}},
            "multi_modal_data is not supported: prompts are text, without images, sound or video",
            "multi_modal_data",
        ),
        ("ab\ud800c", "lone surrogate at position 2", "prompt"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt must be a string", "cache_salt"),
        ({"prompt": "x", "cache_salt": "\udfff"}, "lone surrogate", "cache_salt"),
    ],
)
def test_refused_prompts(processor: InputProcessor, prompt: Any, reason: str, param: str) -> None:
    refused(processor, prompt, reason, param)
    assert process(processor, [5]).prompt_token_ids == [5], "the processor lives on"


def test_a_request_id_must_be_able_to_cross_the_wire(processor: InputProcessor) -> None:
    with pytest.raises(UserError, match="lone surrogate") as caught:
        processor.process("r\ud800", [5], SamplingParams())
    assert caught.value.param == "request_id"


def test_a_prompt_that_is_too_long_says_both_numbers(processor: InputProcessor) -> None:
    assert len(process(processor, [5] * (CONTEXT - 1)).prompt_token_ids) == CONTEXT - 1
    error = refused(
        processor,
        [5] * CONTEXT,
        "maximum context length is 32 tokens, prompt and at least one new token together, but the prompt has 32 tokens",
        "prompt",
    )
    assert isinstance(error, PromptTooLongError)


def test_a_huge_text_is_refused_before_it_is_tokenised(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    error = refused(processor, "x" * 10_000_000, "far fewer than the prompt's 10000000 characters make", "prompt")
    assert isinstance(error, PromptTooLongError)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of the texts that were tokenised. Texts are long here from 64 characters on."""
    monkeypatch.setattr(text_lengths, "UNCOUNTED_CHARACTERS", 64)
    monkeypatch.setattr(text_lengths, "COUNTED_CHARACTERS", 22)
    monkeypatch.setattr(text_lengths, "SEAM_TOKENS", 4)
    found: list[int] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        found.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    return found


def test_the_tokens_of_a_long_text_are_counted_by_pieces(encoded: list[int], processor: InputProcessor) -> None:
    text = "zq" * 500
    error = refused(processor, text, "far fewer than the prompt's 1000 characters make", "prompt")
    assert isinstance(error, PromptTooLongError)
    assert max(encoded) == 22
    assert len(encoded) < 6, "the count ends as soon as there are too many"


def test_a_long_text_of_few_tokens_fits(encoded: list[int], processor: InputProcessor) -> None:
    text = " spaced out" * 30  # a token of 11 characters, two in a piece
    assert len(process(processor, text).prompt_token_ids) == 30
    assert encoded[-1] == len(text)
    encoded.clear()
    process(processor, "q" * 400, truncate_prompt_tokens=4)
    assert encoded == [400], "where the text is cut, its tokens are not too many"


def test_chats_and_pieces_of_every_kind_of_tokenizer(encoded: list[int]) -> None:
    for tokenizer in (byte_level(), sentencepiece(), wordpiece()):
        processor = make(tokenizer)
        with pytest.raises(PromptTooLongError, match="far fewer"):
            processor.tokenise_chat("the fox, " * 200, add_special_tokens=False)
        assert max(encoded) == 22


def test_truncation_keeps_the_last_tokens(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    ids = list(range(5, 105))
    assert process(processor, ids, truncate_prompt_tokens=4).prompt_token_ids == ids[-4:]
    assert process(processor, ids[:3], truncate_prompt_tokens=4).prompt_token_ids == ids[:3]
    text = "the fox sleeps " * 500
    assert process(processor, text, truncate_prompt_tokens=6).prompt_token_ids == tokenizer.encode(text)[-6:]
    refused(processor, ids, "has 50 tokens", "prompt", truncate_prompt_tokens=50)


def test_a_model_without_tokenizer() -> None:
    processor = make(None)
    assert process(processor, [5, 6]).prompt_token_ids == [5, 6]
    refused(processor, "text", "needs a tokenizer", "prompt")
    refused(processor, [5], "needs a tokenizer|need a tokenizer", "stop", stop="x")
    refused(processor, [5], "need a tokenizer", "bad_words", bad_words=["x"])
    with pytest.raises(UserError, match="chat needs a tokenizer"):
        processor.render_chat(conversation_of([{"role": "user", "content": "x"}]))


# -- sampling parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"stop_token_ids": [VOCABULARY]}, "400 is not a token id"),
        ({"allowed_token_ids": [3, 4, VOCABULARY + 9]}, "409 is not a token id"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "400 is not a token id"),
        ({"bad_words": ["  "]}, "must hold words"),
        ({"bad_words": ["a\ud800"]}, "lone surrogate"),
        ({"bad_words": ["x"] * 1025}, "at most 1024"),
        ({"stop": ["a\ud800"]}, "lone surrogate"),
        ({"stop": ["x" * 20_000]}, "must not exceed 16384 characters"),
        ({"min_tokens": CONTEXT, "max_tokens": None}, "room for 31"),
    ],
)
def test_refused_parameters(processor: InputProcessor, params: dict[str, Any], reason: str) -> None:
    refused(processor, [5], reason, next(iter(params)), **params)


def test_parameters_must_be_sampling_params(processor: InputProcessor) -> None:
    with pytest.raises(UserError, match="params must be SamplingParams, not dict") as caught:
        processor.process("r", [5], {"n": 1})  # type: ignore[arg-type]
    assert caught.value.param == "params"


def test_everything_in_range_is_taken(processor: InputProcessor) -> None:
    last = VOCABULARY - 1
    params = SamplingParams(stop_token_ids=[0, last], allowed_token_ids=[0, last], logit_bias={0: 1.0, last: -1.0})
    assert processor.process("r", [0, last], params).params == params


@pytest.mark.parametrize(("asked", "resolved"), [(None, CONTEXT - 3), (5, 5), (29, 29), (30, 29), (10**9, 29)])
def test_max_tokens_is_resolved_within_the_context(processor: InputProcessor, asked: int | None, resolved: int) -> None:
    assert process(processor, [5, 6, 7], max_tokens=asked).max_tokens == resolved


def test_end_of_sequence_tokens(processor: InputProcessor) -> None:
    assert process(processor, [5]).eos_token_ids == [1, 7]
    assert process(processor, [5], ignore_eos=True).eos_token_ids == []


def test_the_end_token_of_the_tokenizer_ends_a_sequence_too() -> None:
    """Also where the model's configuration names other tokens, or none."""
    ended = Tokenizer(byte_level_backend(), special_tokens={"eos_token": "<|im_start|>"})
    for named, expected in (([1, 7], [1, 7, 2]), ([], [2]), ([2], [2])):
        processor = InputProcessor(ended, vocab_size=VOCABULARY, max_model_len=CONTEXT, eos_token_ids=named, seed=0)
        assert process(processor, [5]).eos_token_ids == expected
        assert process(processor, [5], ignore_eos=True).eos_token_ids == []


def test_cache_salt_of_the_call_and_of_the_prompt(processor: InputProcessor) -> None:
    assert processor.process("r", [5], SamplingParams(), cache_salt="a").cache_salt == "a"
    prompt: Prompt = {"prompt_token_ids": [5], "cache_salt": "b"}
    assert processor.process("r", prompt, SamplingParams(), cache_salt="a").cache_salt == "b"
    assert process(processor, [5]).cache_salt == ""


def test_a_given_seed_is_kept() -> None:
    processor = make(None)
    assert [process(processor, [5], seed=seed).seed for seed in (0, 17, 2**63 - 1)] == [0, 17, 2**63 - 1]
    assert 0 <= process(processor, [5], seed=-3).seed < 2**63


def test_drawn_seeds_are_reproducible_and_differ() -> None:
    def draw(seed: int) -> list[int]:
        processor = make(None, seed=seed)
        return [process(processor, [5]).seed for _ in range(100)]

    assert draw(3) == draw(3)
    assert not set(draw(3)) & set(draw(4))
    assert len(set(draw(3))) == 100
    assert all(0 <= seed < 2**63 for seed in draw(-9))


def test_a_request_with_a_seed_does_not_change_the_others() -> None:
    plain, mixed = make(None), make(None)
    expected = [process(plain, [5]).seed for _ in range(3)]
    drawn = [process(mixed, [5], seed=seed).seed for seed in (None, 42, None)]
    assert [drawn[0], drawn[2]] == [expected[0], expected[2]]


def test_seed_bits_are_spread() -> None:
    """Every one of the 63 bits is set in about half of 2,000 consecutive draws."""
    draws = [mix_seed(0, number) for number in range(2000)]
    for bit in range(63):
        assert 850 < sum(draw >> bit & 1 for draw in draws) < 1150


# -- bad words -----------------------------------------------------------------------------------------------


def test_bad_words_alone_and_after_a_space(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    alone, spaced = tokenizer.encode("t"), tokenizer.encode(" t")
    assert (len(alone), len(spaced)) == (1, 1)
    assert process(processor, [5], bad_words=["t"]).bad_token_sequences == [alone, spaced]
    assert process(processor, [5], bad_words=[" t"]).bad_token_sequences == [alone, spaced]


def test_a_bad_word_whose_space_is_a_token_of_its_own(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    alone, spaced = tokenizer.encode("\x01"), tokenizer.encode(" \x01")
    assert len(spaced) == len(alone) + 1
    assert process(processor, [5], bad_words=["\x01"]).bad_token_sequences == [alone]


def test_no_bad_words(processor: InputProcessor) -> None:
    assert process(processor, [5]).bad_token_sequences == []


# -- chat ----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 5.0, True])
def test_a_wrong_id_is_found_in_every_piece_of_a_long_list(
    processor: InputProcessor, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "PIECE_TOKENS", 4)
    for place in (0, 3, 4, 9):
        token_ids = [5] * 10
        processor.check_token_ids(token_ids, "prompt")
        token_ids[place] = wrong
        with pytest.raises(UserError, match="prompt"):
            processor.check_token_ids(token_ids, "prompt")


@pytest.fixture(scope="module")
def chat() -> Iterator[InputProcessor]:
    processor = make(Tokenizer(byte_level_backend(), special_tokens=SPECIAL, chat_templates={"default": TEMPLATE}))
    yield processor
    processor.close()


def test_chat_is_rendered_and_tokenised(chat: InputProcessor) -> None:
    rendered = chat.render_chat(conversation_of([{"role": "user", "content": "the fox"}]))
    assert rendered.text == "user: the fox\nbot:"
    assert chat.tokenizer is not None
    assert chat.tokenizer.decode(rendered.token_ids) == rendered.text
    messages = [{"role": "bot", "content": "the fox"}]
    continued = chat.render_chat(conversation_of(messages, add_generation_prompt=False, continue_final_message=True))
    assert continued.text == "bot: the fox"


def test_chat_adds_no_special_tokens_unless_asked() -> None:
    backend = sentencepiece().backend
    processor = make(Tokenizer(backend, chat_templates={"default": "{{ bos_token }}the"}, special_tokens=SPECIAL))
    messages = [{"role": "user", "content": "x"}]
    assert processor.render_chat(conversation_of(messages)).token_ids.count(1) == 1
    assert processor.render_chat(conversation_of(messages, add_special_tokens=True)).token_ids.count(1) == 2
    processor.close()


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        ("\ud800", UserError, "messages is not valid Unicode"),
        ("x" * 100_000, PromptTooLongError, "characters, far more"),
    ],
)
def test_refused_conversations(chat: InputProcessor, content: str, error: type[UserError], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        chat.render_chat(conversation_of([{"role": "user", "content": content}]))
    assert caught.value.param == "messages"


def test_chat_without_template(processor: InputProcessor) -> None:
    with pytest.raises(UserError, match="no chat template"):
        processor.render_chat(conversation_of([{"role": "user", "content": "x"}]))


# -- the whole -----------------------------------------------------------------------------------------------


def test_requests_survive_the_wire(processor: InputProcessor) -> None:
    request = process(processor, "the fox", stop=["é"], bad_words=["the"], logit_bias={3: 1.5}, seed=-1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest) == request


def test_threads_share_one_processor(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer)
    seeds: list[int] = []

    def work() -> None:
        for _ in range(100):
            seeds.append(process(processor, "the fox").seed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seeds) == sorted(mix_seed(0, number) for number in range(400))


@pytest.mark.parametrize(
    ("most", "wanted", "given"),
    [(-1, -1, 9000), (-1, 5000, 5000), (-1, 9001, 9000), (12_000, 11_000, 9000), (8000, -1, None)],
)
def test_alternatives_up_to_the_whole_vocabulary(most: int, wanted: int, given: int | None) -> None:
    wide = InputProcessor(None, vocab_size=9000, max_model_len=CONTEXT, eos_token_ids=[], seed=0, max_logprobs=most)
    if given is None:
        refused(wide, [5], "asks for 9000 alternatives, and at most 8000", "logprobs", logprobs=wanted)
        return
    params = process(wide, [5], logprobs=wanted, prompt_logprobs=wanted).params
    assert (params.logprobs, params.prompt_logprobs) == (given, given)
