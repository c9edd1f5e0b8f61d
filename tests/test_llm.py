"""LLM: batches in order, errors before anything runs, Ctrl-C, two engines at once, plain scripts."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config.options import EngineOptions
from quire.engine.messages import EngineOutputs
from quire.errors import ConfigError, EngineDeadError, ModelLoadError, PromptTooLongError, UserError
from tests.engine.conftest import TINY_CONFIG
from tests.engine.scripts import start_script

FAKES = "tests.fakes.factories:"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def tiny_options(tmp_path: Path) -> EngineOptions:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    return EngineOptions(model=str(tmp_path), num_blocks_override=64, skip_tokenizer_init=True)


@pytest.fixture
def llm(tiny_options: EngineOptions) -> Iterator[LLM]:
    with LLM.from_options(tiny_options, executor=FAKES + "plain") as llm:
        yield llm


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_blocks_override=64, num_threads=1) as llm:
        yield llm


def first_tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_used_blocks"]) == (0, 0, 0)


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[1 + index] * (1 + index % 5) for index in range(40)]
    lengths = [1 + (index * 7) % 11 for index in range(40)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert_idle(llm)


def test_every_form_of_a_prompt(llm: LLM) -> None:
    (expected,) = first_tokens(llm, [[1, 2, 3]])
    assert first_tokens(llm, [1, 2, 3]) == [expected]
    assert first_tokens(llm, {"prompt_token_ids": [1, 2, 3]}) == [expected]
    assert first_tokens(llm, [{"prompt_token_ids": [1, 2, 3]}, [4]])[0] == expected
    assert llm.generate([]) == []
    assert len(llm.generate([1, 2, 3])[0].outputs[0].token_ids) <= 16


def test_beam_search_says_what_generate_says_in_the_words_of_vllm(bundled: LLM) -> None:
    prompts = ["def add(a, b):", [5, 6, 7]]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=0.5, logprobs=1)
    found = bundled.beam_search(prompts, params)
    outputs = bundled.generate(prompts, params.to_sampling_params())
    for search, output in zip(found, outputs, strict=True):
        prompt = bundled.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=True)
        assert len(search.sequences) == 3
        for sequence, completion in zip(search.sequences, output.outputs, strict=True):
            assert sequence.tokens == output.prompt_token_ids + completion.token_ids
            assert sequence.text == prompt + completion.text
            assert sequence.cum_logprob == completion.cumulative_logprob
            assert sequence.score == completion.score == pytest.approx(sequence.cum_logprob / 6**0.5)
            assert sequence.logprobs == completion.logprobs
            assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
        scores = [sequence.score for sequence in search.sequences]
        assert scores == sorted(scores, reverse=True)
    assert found[0].sequences[0].text.startswith("def add(a, b):")
    assert_idle(bundled)


def test_a_beam_search_may_show_its_end(bundled: LLM) -> None:
    tokenizer = bundled.get_tokenizer()
    (end,) = bundled.model_config.eos_token_ids
    texts = {}
    for shown in (False, True):
        params = SamplingParams(
            n=2, use_beam_search=True, logit_bias={end: 100.0}, skip_special_tokens=False,
            include_stop_str_in_output=shown,
        )  # fmt: skip
        best = bundled.generate("a", params)[0].outputs[0]
        assert (best.token_ids, best.finish_reason, best.stop_reason) == ([end], "stop", None)
        texts[shown] = best.text
    assert texts == {False: "", True: tokenizer.decode([end], skip_special_tokens=False)}


def test_beam_search_takes_beam_search_params(llm: LLM) -> None:
    with pytest.raises(UserError, match="must be BeamSearchParams"):
        llm.beam_search([[1, 2]], SamplingParams())  # type: ignore[arg-type]
    (found,) = llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    assert [(len(sequence.tokens), sequence.text) for sequence in found.sequences] == [(5, None), (5, None)]
    assert_idle(llm)


def test_best_of(llm: LLM) -> None:
    """The best two of five are those that five completions with log-probabilities show."""
    common = {"seed": 5, "max_tokens": 9, "ignore_eos": True}
    (all_five,) = llm.generate([[1, 2, 3]], SamplingParams(n=5, logprobs=0, **common))
    best = sorted(all_five.outputs, key=lambda completion: -completion.cumulative_logprob)[:2]
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(n=2, best_of=5, **common))
    assert [completion.token_ids for completion in output.outputs] == [completion.token_ids for completion in best]
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert [completion.cumulative_logprob for completion in output.outputs] == pytest.approx(
        [completion.cumulative_logprob for completion in best]
    )
    assert output.outputs[0].logprobs is None
    assert_idle(llm)


def test_parallel_completions(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert llm.generate([[9], [1, 2, 3]], params)[1].outputs == output.outputs
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "error_type", "message"),
    [
        ([97], UserError, "prompt 2: .*97 is not a token id"),
        ([], UserError, "prompt 2: the prompt is empty"),
        ([1] * 3000, PromptTooLongError, "prompt 2: .*the prompt has 3000 tokens"),
        ("text", UserError, "prompt 2: a text prompt needs a tokenizer"),
        (3, UserError, "prompt 2: a prompt must be"),
    ],
)
def test_one_bad_prompt_is_named_before_anything_runs(
    llm: LLM, prompt: object, error_type: type[UserError], message: str
) -> None:
    with pytest.raises(error_type, match=message):
        llm.generate([[1], [2], prompt], GREEDY)  # type: ignore[list-item]
    assert llm.stats()["steps_total"] == 0
    assert len(first_tokens(llm, [1])[0]) == 6


def test_what_the_core_refuses_is_named_and_ends_the_batch(tiny_options: EngineOptions) -> None:
    small = msgspec.structs.replace(tiny_options, num_blocks_override=8)
    with LLM.from_options(small, executor=FAKES + "plain") as llm:
        params = [GREEDY, SamplingParams(n=16, max_tokens=60)]
        with pytest.raises(UserError, match="prompt 1: the request needs up to"):
            llm.generate([[1] * 20, [1] * 20], params)
        assert_idle(llm)
        assert len(first_tokens(llm, [1])[0]) == 6


def test_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(UserError, match="a list of 2"):
        llm.generate([[1], [2]], [GREEDY])
    with pytest.raises(UserError, match="a list of 1"):
        llm.generate([[1]], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="prompts must be"):
        llm.generate(5)  # type: ignore[arg-type]


def test_two_engines_of_different_block_size_in_one_process(tiny_options: EngineOptions) -> None:
    with (
        LLM.from_options(msgspec.structs.replace(tiny_options, block_size=8), executor=FAKES + "plain") as small,
        LLM.from_options(msgspec.structs.replace(tiny_options, block_size=32), executor=FAKES + "plain") as large,
    ):
        assert (small.ready.block_size, large.ready.block_size) == (8, 32)
        prompts = [[1 + index % 90 for index in range(50)], [3, 4]]
        assert first_tokens(small, prompts) == first_tokens(large, prompts)
        small.shutdown()
        assert first_tokens(large, prompts)[1] == first_tokens(large, [3, 4])[0]


def test_an_engine_error_raises_and_stays(tiny_options: EngineOptions) -> None:
    llm = LLM.from_options(tiny_options, executor=FAKES + "failing_step")
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="injected failure at step 3"):
            llm.generate([[1], [2]], GREEDY)
    with pytest.raises(EngineDeadError, match="injected failure"):
        llm.stats()
    llm.shutdown()


def test_after_shutdown_every_call_says_so(llm: LLM) -> None:
    llm.shutdown()
    llm.shutdown()
    for action in (lambda: llm.generate([1]), llm.stats, llm.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            action()


def test_ctrl_c_aborts_and_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_tokens(llm, [[7, 8], [9]])
    receive, calls = llm._client.receive, 0

    def receive_and_interrupt(timeout: float | None = None) -> EngineOutputs | None:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return receive(timeout)

    monkeypatch.setattr(llm._client, "receive", receive_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=500, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is before
    assert 4 <= calls < 10
    assert_idle(llm)
    assert first_tokens(llm, [[7, 8], [9]]) == expected


def test_it_works_in_a_thread(llm: LLM) -> None:
    expected, found = first_tokens(llm, [[1, 2]]), []
    thread = threading.Thread(target=lambda: found.append(first_tokens(llm, [[1, 2]])))
    thread.start()
    thread.join(60)
    assert found == [expected]


def test_stats_and_the_prefix_cache(llm: LLM) -> None:
    prompt = [1 + index % 90 for index in range(40)]
    assert llm.stats()["prefix_cache_hit_rate"] == 0.0
    assert [llm.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    stats = llm.stats()
    assert stats["prefix_cache_hit_rate"] == stats["prefix_cache_hits_total"] / 80 == 0.4
    assert (stats["kv_cache_usage"], stats["kv_cache_waste"], stats["generation_tokens_total"]) == (0.0, 0.0, 12)
    assert llm.reset_prefix_cache() > 0
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_mistakes_in_the_options() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM(max_modl_len=5)
    with pytest.raises(ModelLoadError, match="/no/such/model"):
        LLM("/no/such/model")


def test_a_model_without_a_tokenizer_is_a_clear_error(tiny_options: EngineOptions) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        LLM.from_options(msgspec.structs.replace(tiny_options, skip_tokenizer_init=False), executor=FAKES + "plain")


def test_no_progress_bar_without_a_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], GREEDY, use_tqdm=True)
    assert capfd.readouterr() == ("", "")


def test_the_bundled_model_completes_text(bundled: LLM) -> None:
    outputs = bundled.generate(["import os\n", "def main("], SamplingParams(temperature=0.0, max_tokens=12))
    for output in outputs:
        completion = output.outputs[0]
        assert output.prompt is not None
        assert 1 <= len(completion.token_ids) <= 12
        assert bundled.get_tokenizer().decode(completion.token_ids) == completion.text != ""
        assert output.metrics.latency >= output.metrics.time_to_first_token > 0


def test_a_stop_string_ends_the_text_and_the_work(bundled: LLM) -> None:
    (plain,) = bundled.generate("import os\n", SamplingParams(temperature=0.0, max_tokens=30))
    text = plain.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    (stopped,) = bundled.generate("import os\n", SamplingParams(temperature=0.0, max_tokens=30, stop=stop))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert_idle(bundled)


def test_chat_renders_and_answers_each_conversation(bundled: LLM) -> None:
    first = [{"role": "user", "content": "import os"}]
    second = [*first, {"role": "assistant", "content": "import sys"}, {"role": "user", "content": "class A:"}]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    both = bundled.chat([first, second], params)
    assert [output.prompt is not None and "import os" in output.prompt for output in both] == [True, True]
    assert bundled.chat(second, params)[0].outputs == both[1].outputs
    with pytest.raises(UserError, match=r"conversation 1: .*role"):
        bundled.chat([first, [{"content": "no role"}]], params)


SCRIPT = """
import json
from quire import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
llm = LLM(max_model_len=128, num_blocks_override=16, num_threads=1)
print(json.dumps([output.outputs[0].text for output in llm.generate(["import os", "class A"], params)]))
"""


def test_a_plain_script_needs_no_main_guard(tmp_path: Path, bundled: LLM) -> None:
    with start_script(tmp_path / "script.py", SCRIPT) as script:
        output, errors = script.communicate(timeout=120)
    assert (script.returncode, errors) == (0, "")
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    assert json.loads(output) == [o.outputs[0].text for o in bundled.generate(["import os", "class A"], params)]


@pytest.fixture
def with_priorities(tiny_options: EngineOptions) -> EngineOptions:
    return msgspec.structs.replace(tiny_options, scheduling_policy="priority")


def test_priorities_for_all_or_one_each(with_priorities: EngineOptions) -> None:
    with LLM.from_options(with_priorities, executor=FAKES + "plain") as llm:
        check_priorities(llm)


def test_priorities_are_off_by_default(llm: LLM) -> None:
    with pytest.raises(UserError, match="got priority -1, but priorities are off") as caught:
        llm.generate([[1], [2]], GREEDY, priority=[0, -1])
    assert caught.value.param == "priority"
    assert_idle(llm)


def check_priorities(llm: LLM) -> None:
    plain = first_tokens(llm, [[1], [2], [3]])
    for priority in (5, [3, -1, 0]):
        outputs = llm.generate([[1], [2], [3]], GREEDY, priority=priority)
        assert [output.outputs[0].token_ids for output in outputs] == plain
    for wrong, message in (([1, 2], "a list of 3"), ("xyz", "prompt 0: priority must be an integer"), (101, "between")):
        with pytest.raises(UserError, match=message) as caught:
            llm.generate([[1], [2], [3]], GREEDY, priority=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "priority"
    assert_idle(llm)


def test_a_better_priority_finishes_first(with_priorities: EngineOptions) -> None:
    with LLM.from_options(msgspec.structs.replace(with_priorities, max_num_seqs=1), executor=FAKES + "plain") as llm:
        outputs = llm.generate([[1], [2], [3]], GREEDY, priority=[2, 0, 1])
        latencies = [output.metrics.latency for output in outputs]
        assert sorted(range(3), key=latencies.__getitem__) == [1, 2, 0]


def test_a_time_limit_of_one_prompt(llm: LLM) -> None:
    params = [GREEDY, msgspec.structs.replace(GREEDY, timeout_s=1e-9)]
    outputs = llm.generate([[1], [2]], params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "timeout"]
    assert outputs[1].outputs[0].token_ids == []
    assert_idle(llm)


def test_a_registered_prefix_is_hit_to_the_last_token_and_kept(llm: LLM) -> None:
    prefix, prompt = list(range(1, 38)), [*range(1, 38), 50, 51]
    plain = first_tokens(llm, [prompt])
    llm.reset_prefix_cache()
    prefix_id = llm.register_prefix(prefix)
    salted = llm.register_prefix({"prompt_token_ids": prefix}, cache_salt="tenant")
    assert llm.stats()["num_registered_blocks"] == llm.stats()["num_used_blocks"] == 6
    first_tokens(llm, [[60 + index % 30] * 100 for index in range(20)])
    llm.reset_prefix_cache()
    [output] = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 37
    assert [output.outputs[0].token_ids] == plain
    assert llm.unregister_prefix(prefix_id) == llm.unregister_prefix(salted) == 3
    assert_idle(llm)
    for unknown in (prefix_id, "?"):
        with pytest.raises(UserError, match="no prefix"):
            llm.unregister_prefix(unknown)


def test_a_prefix_changes_no_seed(tiny_options: EngineOptions) -> None:
    """Tokens are drawn from the engine's seed and the request's number: the prefix takes none."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    found = []
    for prefixes in ([], [[1, 2, 3]]):
        with LLM.from_options(tiny_options, executor=FAKES + "plain") as llm:
            for prefix in prefixes:
                llm.register_prefix(prefix)
            found.append(first_tokens(llm, [[1, 2, 3, 4], [1, 2, 3, 5]], params))
    assert found[0] == found[1]


def test_a_prefix_that_cannot_be_kept_is_refused(llm: LLM, tiny_options: EngineOptions) -> None:
    for wrong in ([], [97], [1] * 5000, "text"):
        with pytest.raises(UserError):
            llm.register_prefix(wrong)
    assert_idle(llm)
    options = msgspec.structs.replace(tiny_options, enable_prefix_caching=False)
    with LLM.from_options(options, executor=FAKES + "plain") as uncached:
        with pytest.raises(UserError, match="enable_prefix_caching"):
            uncached.register_prefix([1, 2, 3])
        assert len(first_tokens(uncached, [[1]])) == 1


def test_the_bundled_model_says_the_same_behind_a_registered_prefix(bundled: LLM) -> None:
    """Bitwise: the same tokens and the same log-probabilities, greedy and sampled, with several completions."""
    text = "Once upon a time there was a little dog who lived in a house by the"
    prompts = [text + " sea and", text + " old mill.", text]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=3, n=3),
    ]
    found = []
    for register in (False, True):
        bundled.reset_prefix_cache()
        prefix_id = bundled.register_prefix(text) if register else None
        outputs = [output for each in params for output in bundled.generate(prompts, each)]
        found.append([[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs])
        if prefix_id is not None:
            length = len(bundled.get_tokenizer().encode(text))
            assert length % 16, "a partial block is what this is about"
            assert outputs[0].num_cached_tokens == outputs[1].num_cached_tokens == length
            bundled.unregister_prefix(prefix_id)
    assert found[0] == found[1]
