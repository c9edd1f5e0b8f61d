"""What callers receive: text, tokens, logprobs, stop strings, metrics, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.input_processor import InputProcessor
from quire.engine.messages import Abort
from quire.engine.output_processor import OutputProcessor, ProcessedOutputs
from quire.errors import UserError
from quire.outputs import CompletionOutput, RequestOutput, RequestTiming, SequenceUpdate
from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from quire.step import PromptLogprobs, TokenLogprobs
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.tokenization.build import byte_level, sentencepiece

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOKENIZER = byte_level()
EOS = 1


class Desk:
    """An output processor, and the shortest way to give it requests and updates."""

    def __init__(self, tokenizer: Tokenizer | None = TOKENIZER) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)

    def add(self, request_id: str = "r", *, delta: bool = False, final_only: bool = False, **params: Any) -> None:
        inputs = InputProcessor(self.tokenizer, vocab_size=400, max_model_len=4096, eos_token_ids=[EOS], seed=0)
        request = inputs.process(request_id, [5, 6], SamplingParams(**params))
        self.processor.add_request(request, "prompt", delta=delta, final_only=final_only)

    def feed(self, *updates: SequenceUpdate) -> ProcessedOutputs:
        return self.processor.process(list(updates))

    def one(self, *updates: SequenceUpdate) -> RequestOutput:
        processed = self.feed(*updates)
        assert len(processed.outputs) == 1
        return processed.outputs[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def update(token_ids: list[int], request_id: str = "r", index: int = 0, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(request_id, index, token_ids, **fields)


def first(output: RequestOutput) -> CompletionOutput:
    assert len(output.outputs) == 1
    return output.outputs[0]


# -- text ---------------------------------------------------------------------------------------------------


def test_cumulative_outputs_hold_everything_so_far() -> None:
    desk = Desk()
    desk.add()
    tokens = ids("the fox")
    seen = [first(desk.one(update([token]))) for token in tokens]
    assert [output.token_ids for output in seen] == [tokens[: i + 1] for i in range(len(tokens))]
    assert [output.text for output in seen] == [TOKENIZER.decode(tokens[: i + 1]) for i in range(len(tokens))]
    last = desk.one(update([EOS], finish_reason=STOP))
    assert (first(last).text, first(last).token_ids) == ("the fox", [*tokens, EOS])
    assert (first(last).finish_reason, first(last).stop_reason, last.finished) == ("stop", None, True)
    assert (last.prompt, last.prompt_token_ids, last.request_id) == ("prompt", [5, 6], "r")
    assert seen[0].token_ids == tokens[:1], "an earlier output does not change"


def test_deltas_hold_what_is_new() -> None:
    desk = Desk()
    desk.add(delta=True)
    outputs = [first(desk.one(update([token]))) for token in ids("the fox")]
    outputs.append(first(desk.one(update([EOS], finish_reason=STOP))))
    assert "".join(output.text for output in outputs) == "the fox"
    assert [token for output in outputs for token in output.token_ids] == [*ids("the fox"), EOS]
    assert all(len(output.token_ids) == 1 for output in outputs)


def test_only_the_final_output_when_that_is_wanted() -> None:
    desk = Desk()
    desk.add(final_only=True)
    assert desk.feed(update(ids("the "))).outputs == []
    output = desk.one(update(ids("fox"), finish_reason=LENGTH))
    assert (first(output).text, output.finished) == ("the fox", True)


def test_a_split_character_waits_for_its_last_byte() -> None:
    desk = Desk()
    desk.add(delta=True)
    *start, last = ids("\U0001d11e")
    assert [first(desk.one(update([token]))).text for token in start] == ["", "", ""]
    assert first(desk.one(update([last]))).text == "\U0001d11e"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    desk = Desk()
    desk.add(delta=True)
    output = desk.one(update(ids("\U0001d11e")[:3], finish_reason=LENGTH))
    assert (first(output).text, first(output).finish_reason) == ("\ufffd", "length")


def test_the_stop_token_is_in_the_tokens_but_not_in_the_text() -> None:
    word = ids("x")[0]
    for params, text in (
        ({}, "the"),
        ({"skip_special_tokens": False}, "the"),
        ({"include_stop_str_in_output": True}, "thex"),
    ):
        desk = Desk()
        desk.add(stop_token_ids=[word], **params)
        output = desk.one(update([*ids("the"), word], finish_reason=STOP, stop_reason=word))
        assert first(output).text == text
        assert (first(output).token_ids[-1], first(output).stop_reason) == (word, word)


def test_special_tokens_are_shown_when_asked() -> None:
    for skip, text in ((True, "the"), (False, "<|im_start|>the")):
        desk = Desk()
        desk.add(skip_special_tokens=skip)
        assert first(desk.one(update([2, *ids("the")]))).text == text


def test_a_word_keeps_its_space_after_the_prompt() -> None:
    tokenizer = sentencepiece()
    desk = Desk(tokenizer)
    inputs = InputProcessor(tokenizer, vocab_size=400, max_model_len=100, eos_token_ids=[], seed=0)
    desk.processor.add_request(inputs.process("r", "the", SamplingParams()))
    assert first(desk.one(update([tokenizer.token_to_id("▁fox")]))).text == " fox"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_without_detokenisation_there_is_no_text(tokenizer: Tokenizer | None) -> None:
    desk = Desk(tokenizer)
    desk.add(detokenize=False, logprobs=0)
    output = first(desk.one(update([9, 10], logprobs=[logprobs(9), logprobs(10)], finish_reason=LENGTH)))
    assert (output.text, output.token_ids) == ("", [9, 10])
    assert output.logprobs is not None
    assert output.logprobs[0][9].decoded_token is None


# -- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one\n\nTwo")])
def test_a_stop_string_ends_the_sequence_at_once(include: bool, text: str) -> None:
    desk = Desk()
    desk.add(stop=["\n\nTwo"], include_stop_str_in_output=include, delta=True)
    tokens = ids("one\n\nTwo three")
    stream, aborts, used = "", [], 0
    for token in tokens:
        processed = desk.feed(update([token]))
        aborts += processed.aborts
        for output in processed.outputs:
            stream, used, last = stream + first(output).text, used + 1, output
    assert stream == text
    assert (first(last).finish_reason, first(last).stop_reason, last.finished) == ("stop", "\n\nTwo", True)
    assert aborts == [Abort("r", 0)]
    assert TOKENIZER.decode(tokens[:used]).endswith("Two"), "tokens up to the one that completes the stop string"
    assert desk.processor.num_unfinished == 0


def test_the_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    desk = Desk()
    desk.add(stop=["\n\nTwo"], delta=True)
    texts = [first(desk.one(update([token]))).text for token in ids("a\n\nTwa")]
    assert "".join(texts) == "a\n\nTwa"
    assert texts[1] == ""


def test_held_text_is_released_when_the_sequence_ends() -> None:
    desk = Desk()
    desk.add(stop=["\n\nTwo"], delta=True)
    output = desk.one(update(ids("one\n\nTw"), finish_reason=LENGTH))
    assert (first(output).text, first(output).finish_reason) == ("one\n\nTw", "length")


def test_tokens_after_the_stop_string_in_one_update_are_cut_with_their_logprobs() -> None:
    desk = Desk()
    desk.add(stop=["b"], logprobs=0)
    tokens = [ids(char)[0] for char in "abcd"]
    processed = desk.feed(update(tokens, logprobs=[logprobs(token) for token in tokens]))
    output = first(processed.outputs[0])
    assert (output.text, output.token_ids) == ("a", tokens[:2])
    assert output.logprobs is not None
    assert [list(entry) for entry in output.logprobs] == [[tokens[0]], [tokens[1]]]
    assert output.cumulative_logprob == pytest.approx(-1.0)


def test_no_abort_when_the_core_ended_the_sequence_in_the_same_step() -> None:
    desk = Desk()
    desk.add(stop=["fox"])
    processed = desk.feed(update(ids("the fox"), finish_reason=LENGTH))
    assert processed.aborts == []
    assert first(processed.outputs[0]).finish_reason == "stop"
    assert first(processed.outputs[0]).stop_reason == "fox"


def test_a_stop_string_that_only_the_flush_completes() -> None:
    desk = Desk()
    desk.add(stop=["\ufffd"])
    output = first(desk.one(update([*ids("the"), ids("\U0001d11e")[0]], finish_reason=LENGTH)))
    assert (output.text, output.finish_reason, output.stop_reason) == ("the", "stop", "\ufffd")


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    desk = Desk()
    desk.add(stop=["a"], min_tokens=3, delta=True)
    a = ids("a")[0]
    texts = [first(desk.one(update([a]))).text for _ in range(3)]
    assert texts == ["a", "a", "a"]
    processed = desk.feed(update([a]))
    assert (first(processed.outputs[0]).text, processed.aborts) == ("", [Abort("r", 0)])


@given(
    text=st.text(alphabet="ab\n", max_size=40),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_streams_and_whole_answers_agree(text: str, stops: list[str], sizes: list[int]) -> None:
    """Deltas concatenate to the final text and tokens, however the core's updates are cut."""
    tokens = ids(text) or [5]
    desk = Desk()
    for name, kind in (("delta", {"delta": True}), ("final", {"final_only": True}), ("cumulative", {})):
        desk.add(name, stop=stops, **kind)
    outputs: dict[str, list[CompletionOutput]] = {"delta": [], "final": [], "cumulative": []}
    position, turn = 0, 0
    while position < len(tokens):
        step = tokens[position : position + sizes[turn % len(sizes)]]
        position, turn = position + len(step), turn + 1
        reason = LENGTH if position >= len(tokens) else None
        for output in desk.feed(*(update(step, name, finish_reason=reason) for name in outputs)).outputs:
            outputs[output.request_id].append(first(output))
    final = outputs["final"][-1]
    assert "".join(output.text for output in outputs["delta"]) == final.text
    assert [token for output in outputs["delta"] for token in output.token_ids] == final.token_ids
    assert outputs["cumulative"][-1] == final
    assert all(final.text.startswith(output.text) for output in outputs["cumulative"])
    assert not any(stop in final.text for stop in stops)
    assert desk.processor.num_unfinished == 0


# -- logprobs -----------------------------------------------------------------------------------------------


def logprobs(chosen: int, others: tuple[int, ...] = (), rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs([chosen, *others], [-0.5 - number for number in range(1 + len(others))], rank)


def test_logprobs_by_token_the_chosen_one_first() -> None:
    desk = Desk()
    desk.add(logprobs=2)
    the, fox = ids(" ")[0], ids("x")[0]
    output = first(desk.one(update([fox], logprobs=[logprobs(fox, (the, 9), rank=7)])))
    assert output.logprobs is not None
    entry = output.logprobs[0]
    assert list(entry) == [fox, the, 9]
    assert (entry[fox].rank, entry[the].rank, entry[9].rank) == (7, 1, 2)
    assert (entry[fox].logprob, entry[the].logprob) == (-0.5, -1.5)
    assert (entry[fox].decoded_token, entry[the].decoded_token) == ("x", " ")
    assert output.cumulative_logprob == -0.5


def test_the_chosen_token_is_not_listed_twice() -> None:
    desk = Desk()
    desk.add(logprobs=2)
    output = first(desk.one(update([8], logprobs=[TokenLogprobs([8, 9, 8], [-1.0, -1.0, -1.0], 1)])))
    assert output.logprobs is not None
    assert [(token, entry.rank) for token, entry in output.logprobs[0].items()] == [(8, 1), (9, 1)], (
        "equals share a rank"
    )


def test_delta_logprobs_stay_with_their_tokens_when_text_is_held_back() -> None:
    desk = Desk()
    desk.add(logprobs=0, delta=True, stop=["\n\nTwo"])
    outputs = [first(desk.one(update([token], logprobs=[logprobs(token)]))) for token in ids("a\n\nTwa")]
    for output in outputs:
        assert output.logprobs is not None
        assert [list(entry) for entry in output.logprobs] == [[token] for token in output.token_ids]
    assert outputs[-1].cumulative_logprob == pytest.approx(-0.5 * len(outputs))


def test_no_logprobs_unless_asked() -> None:
    desk = Desk()
    desk.add()
    output = desk.one(update([8]))
    assert (first(output).logprobs, first(output).cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("delta", [True, False])
def test_prompt_logprobs_in_chunks(delta: bool) -> None:
    desk = Desk()
    desk.add(prompt_logprobs=1, delta=delta)
    assert desk.feed(update([], prompt_logprobs=PromptLogprobs(1, [logprobs(6, (7,))]))).outputs == []
    output = desk.one(update([8], prompt_logprobs=PromptLogprobs(2, [logprobs(9)])))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:] if entry] == [[6, 7], [9]]
    again = desk.one(update([8]))
    assert (again.prompt_logprobs is None) == delta


# -- several sequences, metrics, ends -----------------------------------------------------------------------


def test_a_request_ends_with_the_last_of_its_sequences() -> None:
    desk = Desk()
    desk.add(n=3)
    output = desk.one(
        update(ids("the"), index=0), update(ids("fox"), index=1), update([EOS], index=2, finish_reason=STOP)
    )
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
        (0, "the", None),
        (1, "fox", None),
        (2, "", "stop"),
    ]
    assert not output.finished
    assert not desk.one(update(ids("x"), index=1, finish_reason=LENGTH)).finished
    last = desk.one(update(ids("y"), index=0, finish_reason=LENGTH))
    assert last.finished
    assert [c.text for c in last.outputs] == ["they", "foxx", ""]
    assert desk.processor.num_unfinished == 0


def test_deltas_name_only_the_sequences_with_news() -> None:
    desk = Desk()
    desk.add(n=3, delta=True)
    output = desk.one(update(ids("the"), index=2), update(ids("fox"), index=0))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "fox"), (2, "the")]
    last = desk.one(*(update(ids("x"), index=index, finish_reason=LENGTH) for index in range(3)))
    assert last.finished
    assert [c.index for c in last.outputs] == [0, 1, 2]


def test_a_stop_string_ends_one_sequence_of_several() -> None:
    desk = Desk()
    desk.add(n=2, stop=["fox"])
    processed = desk.feed(update(ids("fox"), index=0), update(ids("the"), index=1))
    assert processed.aborts == [Abort("r", 0)]
    assert not processed.outputs[0].finished
    assert desk.feed(update(ids("late"), index=0)).outputs == [], "updates after the stop are dropped"
    last = desk.one(update(ids("x"), index=1, finish_reason=LENGTH))
    assert [c.text for c in last.outputs] == ["", "thex"]


def test_metrics_are_differences_on_the_cores_clock() -> None:
    desk = Desk()
    desk.add()
    early = desk.one(update([8], timing=RequestTiming(100.0, 101.5, 103.0), num_cached_tokens=16))
    assert (early.metrics.queue_time, early.metrics.time_to_first_token) == (1.5, 3.0)
    late = desk.one(
        update([8], timing=RequestTiming(100.0, 101.5, 110.0, 2), num_cached_tokens=16, finish_reason=LENGTH)
    )
    metrics = late.metrics
    assert (metrics.time_to_first_token, metrics.latency, metrics.num_preemptions) == (3.0, 10.0, 2)
    assert late.num_cached_tokens == 16
    assert early.metrics.latency == 3.0


def test_a_first_token_at_no_time_stays_the_first() -> None:
    desk = Desk()
    desk.add()
    desk.one(update([8], timing=RequestTiming(5.0, 5.0, 5.0)))
    output = desk.one(update([8], timing=RequestTiming(5.0, 5.0, 9.0), finish_reason=LENGTH))
    assert (output.metrics.time_to_first_token, output.metrics.latency) == (0.0, 4.0)


def test_abort_ends_what_is_unfinished() -> None:
    desk = Desk()
    desk.add(n=2, delta=True, stop=["\n\nTwo"])
    desk.feed(update(ids("the"), index=0, finish_reason=LENGTH), update(ids("a"), index=1))
    held = ids("\n")
    desk.feed(update(held, index=1))
    output = desk.processor.abort("r")
    assert output is not None
    assert [(c.index, c.finish_reason, c.text) for c in output.outputs] == [(1, "abort", "\n")]
    assert output.finished
    assert desk.processor.abort("r") is None
    assert desk.feed(update(ids("x"), index=1)) == ProcessedOutputs()


def test_an_abort_by_the_core_is_reported() -> None:
    desk = Desk()
    desk.add()
    output = desk.one(update([], finish_reason=FinishReason.ABORT))
    assert (first(output).finish_reason, output.finished) == ("abort", True)


def test_fail_all_lets_go_of_everything() -> None:
    desk = Desk()
    for name in "abc":
        desk.add(name)
    assert desk.processor.num_unfinished == 3
    assert desk.processor.fail_all() == ["a", "b", "c"]
    assert (desk.processor.num_unfinished, desk.processor.fail_all()) == (0, [])


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    desk = Desk()
    desk.add("same")
    with pytest.raises(UserError, match="'same' is already in use") as caught:
        desk.add("same")
    assert caught.value.param == "request_id"
    desk.feed(update([8], "same", finish_reason=LENGTH))
    desk.add("same")


def test_outputs_come_once_per_request_in_order_of_mention() -> None:
    desk = Desk()
    for name in "abc":
        desk.add(name)
    processed = desk.feed(update([8], "c"), update([8], "a"), update([9], "c"), update([8], "unknown"))
    assert [output.request_id for output in processed.outputs] == ["c", "a"]
    assert first(processed.outputs[0]).token_ids == [8, 9]


def test_nothing_is_kept_of_ended_requests() -> None:
    desk = Desk()
    for number in range(2000):
        name = str(number)
        desk.add(name, stop=["zz"], delta=number % 2 == 0)
        ending = number % 4
        if ending == 0:
            desk.feed(update(ids("zz"), name))
        elif ending == 1:
            desk.feed(update([8], name, finish_reason=LENGTH))
        elif ending == 2:
            desk.processor.abort(name)
        else:
            desk.processor.fail_all()
    assert desk.processor.num_unfinished == 0
    assert vars(desk.processor) == {"_tokenizer": TOKENIZER, "_requests": {}}


def test_with_the_bundled_tokenizer() -> None:
    tokenizer = load_tokenizer("bundled")
    text = "def größe(self):\n    return '日本 🦙'\n\n\ndef two"
    processor = OutputProcessor(tokenizer)
    inputs = InputProcessor(tokenizer, vocab_size=4096, max_model_len=512, eos_token_ids=[0], seed=0)
    processor.add_request(inputs.process("r", "x = 1\n", SamplingParams(stop="\ndef two")), delta=True)
    stream = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        for output in processor.process([update([token])]).outputs:
            stream += first(output).text
    assert stream == text.removesuffix("\ndef two")
    assert processor.num_unfinished == 0


# -- completions that are compared at the end ---------------------------------------------------------------


def ranked(token: int, logprob: float, index: int, **fields: Any) -> SequenceUpdate:
    return update([token], index=index, logprobs=[TokenLogprobs([token], [logprob], 1)], **fields)


@pytest.mark.parametrize("delta", [False, True])
def test_best_of_reports_the_best_at_the_end(delta: bool) -> None:
    desk = Desk()
    desk.add(n=2, best_of=3, delta=delta)
    a, b, c = 5, 6, 7
    assert not desk.feed(ranked(a, -3.0, 0), ranked(b, -1.0, 1), ranked(c, -2.0, 2)).outputs
    assert not desk.feed(ranked(a, -1.0, 0, finish_reason=LENGTH), ranked(b, -4.0, 1, finish_reason=LENGTH)).outputs
    output = desk.one(ranked(c, -0.5, 2, finish_reason=LENGTH))
    assert [(each.index, each.token_ids, each.cumulative_logprob) for each in output.outputs] == [
        (0, [c, c], -2.5),
        (1, [a, a], -4.0),
    ]
    assert all(each.logprobs is None for each in output.outputs)


def test_what_was_broken_off_is_no_better_than_what_ended() -> None:
    desk = Desk()
    desk.add(n=1, best_of=2)
    desk.feed(ranked(7, -9.0, 0, finish_reason=LENGTH), ranked(8, -1.0, 1))
    output = desk.processor.abort("r")
    assert output is not None
    assert first(output).token_ids == [7]


@pytest.mark.parametrize("delta", [False, True])
def test_hypotheses_come_whole(delta: bool) -> None:
    desk = Desk()
    desk.add(n=3, best_of=4, use_beam_search=True, delta=delta)
    tokens = ids("the fox")
    output = desk.one(
        update([*tokens, EOS], index=0, finish_reason=STOP, ranking=(-4.0, -1.0)),
        update(tokens, index=1, finish_reason=LENGTH, ranking=(-4.0, -2.0)),
        update([], index=2, finish_reason=LENGTH),
    )
    assert output.finished
    assert [(each.text, each.cumulative_logprob, each.score, each.finish_reason) for each in output.outputs] == [
        ("the fox", -4.0, -1.0, "stop"),
        ("the fox", -4.0, -2.0, "length"),
    ]
    assert desk.processor.num_unfinished == 0


def test_an_aborted_search_has_no_hypotheses() -> None:
    desk = Desk()
    desk.add(n=2, use_beam_search=True)
    output = desk.processor.abort("r")
    assert output is not None
    assert [(each.token_ids, each.finish_reason, each.score) for each in output.outputs] == [([], "abort", None)] * 2
