"""Logits processors in whole engines: what vLLM's own tests ask of them, and what else a request may have beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, LLMEngine, SamplingParams, StructuredOutputsParams
from quire.errors import ConfigError, UserError
from quire.logits_processors.no_repeated_ngram import ARGUMENT, NoRepeatedNgram
from tests.logits_processors.samples import Counting, Target

OPTIONS: dict[str, Any] = {"num_blocks_override": 200, "num_threads": 1, "block_size": 4}
PROMPTS = ["def f(x):", "class A:", "import os\n", "for i in range("]
NAME = "tests.logits_processors.samples:Target"


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[list[int]]]:
    return [[list(c.token_ids) for c in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """By name and by class."""
    with LLM(**OPTIONS, logits_processors=[NAME, Counting, NoRepeatedNgram], queue_depth=request.param) as llm:
        yield llm


def test_requests_that_ask_for_it_and_others(loaded: LLM, plain: LLM) -> None:
    params = [greedy(extra_args={"target_token": 128}), greedy(), greedy(extra_args={"target_token": 67}), greedy()]
    found, expected = tokens(loaded, PROMPTS, params), tokens(plain, PROMPTS, greedy())
    assert found == [[[128] * 12], expected[1], [[67] * 12], expected[3]]


def test_samples_prompt_hits_and_chunks_see_their_own_tokens(loaded: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 140))}
    expected = [200, 40, 202, 40, 204, 40, 206, 40]
    params = greedy(extra_args={"first": 200}, max_tokens=8, n=3, temperature=1.0)
    assert tokens(loaded, [prompt] * 2, params) == [[expected] * 3] * 2


def test_behind_a_preemption(plain: LLM) -> None:
    """Few blocks: requests lose theirs and begin again with what they had generated."""
    few = OPTIONS | {"num_blocks_override": 24, "max_num_seqs": 4, "max_model_len": 80}
    with LLM(**few, logits_processors=[Counting]) as llm:
        params = greedy(extra_args={"first": 300}, max_tokens=40)
        found = tokens(llm, [{"prompt_token_ids": [7, 8, number]} for number in range(4)], params)
        assert llm.stats()["preemptions_total"] > 0
    assert found == [[[300 + i if i % 2 == 0 else 3 for i in range(40)]]] * 4


def test_masks_count_behind_processors(loaded: LLM) -> None:
    constrained = StructuredOutputsParams(regex="[0-9]{4,9}x")
    params = SamplingParams(max_tokens=20, seed=3, structured_outputs=constrained, extra_args={ARGUMENT: 1})
    [output] = loaded.generate(["x = "], params, use_tqdm=False)
    text, ids = output.outputs[0].text, output.outputs[0].token_ids
    assert text.endswith("x")
    assert text[:-1].isdigit()
    assert len(set(ids)) == len(ids)


def test_one_that_raises_ends_its_requests_alone(plain: LLM) -> None:
    engine = LLMEngine(**OPTIONS, logits_processors=[Target])
    engine.add_request("broken", PROMPTS[0], greedy(extra_args={"target_token": "broken"}))
    engine.add_request("free", PROMPTS[1], greedy())
    found = {}
    while engine.has_unfinished_requests():
        found |= {each.request_id: each for each in engine.step()}
    ended = found["broken"].outputs[0]
    assert (ended.finish_reason, ended.token_ids) == ("error", [])
    assert ended.stop_reason == "the logits processor Target has failed: RuntimeError: broken on purpose"
    assert [list(found["free"].outputs[0].token_ids)] == tokens(plain, PROMPTS[1], greedy())[0]
    engine.add_request("next", PROMPTS[0], greedy(extra_args={"target_token": 9}))
    while engine.has_unfinished_requests():
        found |= {each.request_id: each for each in engine.step()}
    assert list(found["next"].outputs[0].token_ids) == [9] * 12
    engine.shutdown()


def test_drafts_are_of_the_other_requests() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    repeated = {"prompt_token_ids": [5, 6, 7, 8] * 6}
    with LLM(**OPTIONS, logits_processors=[Counting, NoRepeatedNgram], speculative_config=drafts) as llm:
        params = [greedy(extra_args={"first": 200}), greedy(extra_args={ARGUMENT: 3})]
        found = tokens(llm, [repeated] * 2, params)
        assert llm.stats()["draft_tokens_total"] == 0
    assert found[0] == [[200 + i if i % 2 == 0 else 24 for i in range(12)]]
    whole = repeated["prompt_token_ids"] + found[1][0]
    grams = [tuple(whole[i : i + 3]) for i in range(22, len(whole) - 2)]
    assert len(set(grams)) == len(grams)


def test_what_is_refused(loaded: LLM, plain: LLM) -> None:
    with pytest.raises(UserError, match="is not int"):
        loaded.generate("x", greedy(extra_args={"target_token": "x"}), use_tqdm=False)
    with pytest.raises(UserError, match="this engine has loaded none"):
        plain.generate("x", greedy(extra_args={"target_token": 1}), use_tqdm=False)
    with pytest.raises(ConfigError, match="pipeline_parallel_size > 1"):
        LLM(logits_processors=[NAME], pipeline_parallel_size=2)


@pytest.mark.long
def test_two_ranks() -> None:
    with LLM(**OPTIONS, logits_processors=[NAME, Counting], tensor_parallel_size=2) as llm:
        params = [greedy(extra_args={"target_token": 128}), greedy(extra_args={"first": 400}, n=2, temperature=1.0)]
        found = tokens(llm, [{"prompt_token_ids": [4, 5, 6]}] * 2, params)
    assert found == [[[128] * 12], [[400 + i if i % 2 == 0 else 3 for i in range(12)]] * 2]
