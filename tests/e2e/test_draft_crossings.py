"""Drafts beside other features over real workers: the tokens and log-probabilities of an engine without drafts, and
each cell has drafts that were accepted. The matrix in docs/features.md lists these cells (tests/e2e/draft_cells.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from tests.e2e.conftest import exact
from tests.e2e.test_drafts import KINDS, PROMPTS
from tests.e2e.test_restart import GUARD_SECONDS, OPTIONS, compare, fates, open_engine, think
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.models.conftest import SavedModel

__all__ = ["fates"]

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_spec_factor": 2.0},
}
BASE: dict[str, Any] = {"num_blocks_override": 200, "num_threads": 1, "skip_tokenizer_init": True}
Directory = Callable[[str], str]
Scenario = Callable[[LLM], list[RequestOutput]]


@pytest.fixture(scope="module")
def directory(saved_model: Callable[[str], SavedModel]) -> Directory:
    return lambda family: str(saved_model(family).directory)


@pytest.fixture(params=all_but_long(DRAFTERS, ["ngram"]))
def drafts(request: pytest.FixtureRequest) -> dict[str, Any]:
    config: dict[str, Any] = DRAFTERS[request.param]
    return config


def ask(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    """Requests of several kinds, a beam search among them."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(asked, KINDS[: len(prompts)], use_tqdm=False)


def check(model: str, drafts: dict[str, Any], scenario: Scenario = ask, **options: Any) -> dict[str, Any]:
    """Run a scenario without drafts and with them; returns the statistics of the latter."""
    tier = ("kv_offload_dir", "kv_offload_size", "swap_space")
    plain_options = {name: value for name, value in options.items() if name not in tier}
    with LLM(model, **{**BASE, **plain_options}) as llm:
        expected = exact(scenario(llm))
        assert llm.stats()["draft_tokens_total"] == 0
    with LLM(model, speculative_config=drafts, **{**BASE, **options}) as llm:
        found = exact(scenario(llm))
        stats = llm.stats()
    assert found == expected
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    return stats


@pytest.mark.parametrize(
    "family", all_but_long(["llama4", "deepseek-v3", "mixtral", "gpt2"], ["llama4", "deepseek-v3"])
)
def test_layers_of_other_kinds(family: str, directory: Directory, drafts: dict[str, Any]) -> None:
    """Chunked attention, latents that are not chosen among, experts, learned positions."""
    check(directory(family), drafts)


@pytest.mark.parametrize(
    "options",
    all_but_long(
        [
            {"quantization": "w8a8", "kv_cache_dtype": "int8"},
            {"quantization": "int4", "kv_cache_dtype": "bfloat16"},
            {"dtype": "bfloat16"},
            {"num_threads": 2},
        ],
        [{"quantization": "int4", "kv_cache_dtype": "bfloat16"}],
    ),
    ids=str,
)
def test_weights_and_caches(options: dict[str, Any], directory: Directory, drafts: dict[str, Any]) -> None:
    check(directory("llama-wide"), drafts, **options)


def test_disk_tier(directory: Directory, drafts: dict[str, Any], tmp_path: Path) -> None:
    """A second engine loads the blocks that one with drafts has written, those of its answers too."""
    options = {"kv_offload_dir": tmp_path, "kv_offload_size": "64MiB", "swap_space": "4MiB"}
    check(directory("llama-wide"), drafts, **options)
    stats = check(directory("llama-wide"), drafts, **options)
    assert stats["disk_cache_hit_blocks_total"] > 0


def test_registered_prefixes(directory: Directory, drafts: dict[str, Any]) -> None:
    def scenario(llm: LLM) -> list[RequestOutput]:
        prefix = PROMPTS[0][:37]
        name = llm.register_prefix(prefix)
        found = ask(llm, [[*prefix, 3], [*prefix, 4, 5], PROMPTS[1]])
        llm.unregister_prefix(name)
        return found + ask(llm, [[*prefix, 6]])

    assert check(directory("llama"), drafts, scenario)["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("level", all_but_long([1, 2], [1]))
def test_sleep(level: int, directory: Directory, drafts: dict[str, Any]) -> None:
    def scenario(llm: LLM) -> list[RequestOutput]:
        before = ask(llm)
        llm.sleep(level)
        llm.wake_up()
        return before + ask(llm)

    check(directory("llama-wide"), drafts, scenario, queue_depth=2)


def test_two_ranks(directory: Directory, drafts: dict[str, Any]) -> None:
    """Each rank finds its own drafts: they must be the same."""
    model = directory("qwen3")
    kinds = [msgspec.structs.replace(kind, logprobs=None, prompt_logprobs=None) for kind in KINDS]
    few = {"num_blocks_override": 60, "block_size": 8, "queue_depth": 2}

    def scenario(llm: LLM) -> list[RequestOutput]:
        return llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], kinds, use_tqdm=False)

    with LLM(model, **{**BASE, **few}) as llm:
        expected = [[each.token_ids for each in output.outputs] for output in scenario(llm)]
    with LLM(model, speculative_config=drafts, tensor_parallel_size=2, **{**BASE, **few}) as llm:
        found = [[each.token_ids for each in output.outputs] for output in scenario(llm)]
        stats = llm.stats()
    assert found == expected
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.long
@pytest.mark.parametrize("queue_depth", [1, 2])
async def test_restart_in_a_run(
    fates: Fates, queue_depth: int, drafts: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    """Engines are killed under load: requests go on with the same tokens, and so do their drafts."""
    engine = open_engine({**OPTIONS, "queue_depth": queue_depth, "speculative_config": drafts})
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await think(engine)
            await compare(engine, fates, [("die", 23)], 18)
            stats = await engine.stats()
        assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total
        record_property("accepted drafts", stats.accepted_draft_tokens_total)
    finally:
        engine.shutdown()


def test_models_that_pool_have_none(directory: Directory, drafts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is of models that generate"):
        LLM(directory("llama"), runner="pooling", speculative_config=drafts, **BASE)
