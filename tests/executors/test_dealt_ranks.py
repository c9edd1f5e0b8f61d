"""Ranks as processes that hold the same key head, and keep a part of a sequence's tokens each."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executors.choice import make_executor
from quire.executors.multiprocess import RankProcesses
from quire.executors.ranked import RankedExecutor
from tests.e2e import test_eagle
from tests.e2e.test_head_drafts import leaning
from tests.executors.test_multiprocess import Reused, configured, everything, run
from tests.executors.test_shared_prompts import EAGLE, MTP, NGRAMS, found_in
from tests.executors.test_stages import WAYS, outcome
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long
from tests.models.families import FAMILIES, deepseek_v3, llama, qwen2_moe
from tests.models.harness import randomize, save
from tests.models.head_twins import saved

ALIKE = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
FOUR = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "block_size": 4}
SMALL = {"block_size": 4, "num_blocks_override": 48}
"""Blocks of two kinds of layers."""
DRAFT_MODEL = {"speculative_config": {"model": "llama", "num_speculative_tokens": 3, "adaptive": False}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two steps in flight": ("one key head", {**ALIKE, "queue_depth": 2}),
    "in runs of four": ("one key head", {**ALIKE, "cp_kv_cache_interleave_size": 4}),
    "n-gram drafts": ("one key head", {**ALIKE, **NGRAMS, "queue_depth": 2}),
    "suffix drafts": ("one key head", {**ALIKE, "speculative_config": {"method": "suffix", "adaptive": False}}),
    "a draft model": ("one key head", {**ALIKE, **DRAFT_MODEL, **SMALL, "queue_depth": 2}),
    "a head that reads layers": ("of a head", {**ALIKE, **EAGLE, **SMALL, "num_blocks_override": 100}),
    "swapped": ("one key head", {**ALIKE, "preemption_mode": "swap", "swap_space": "16MiB"}),
    "four ranks": ("one key head", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    "four ranks of one key head": ("one key head", FOUR),
    "stages": ("one key head", {**ALIKE, "pipeline_parallel_size": 2}),
    "latents, two steps in flight": ("latents", {**ALIKE, "queue_depth": 2}),
    "latents of four ranks": ("latents", FOUR),
    "latents in runs of four, swapped": (
        "latents",
        {**ALIKE, "cp_kv_cache_interleave_size": 4, "preemption_mode": "swap", "swap_space": "16MiB"},
    ),
    "latents, whole experts, n-gram drafts": ("latents", {**ALIKE, **NGRAMS, "enable_expert_parallel": True}),
    "latents in stages": ("latents", {**ALIKE, "pipeline_parallel_size": 2}),
    "a head of latents": ("a head", {**ALIKE, **MTP, "queue_depth": 2}),
}
USUAL = ["two steps in flight", "latents, two steps in flight"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 1}
    models = {
        "llama": llama(),
        "one key head": llama(hidden_size=64, **sizes),
        "latents": deepseek_v3(num_attention_heads=8, num_key_value_heads=8),
    }
    found = {name: save(randomize(model), tmp_path_factory.mktemp("model")) for name, model in models.items()}
    found["a head"] = tmp_path_factory.mktemp("head")
    saved("deepseek-v3", found["a head"])
    leaning(found["a head"])
    eagle = tmp_path_factory.mktemp("eagle3")
    test_eagle.saved("eagle3", eagle, **sizes)
    return {**found, "of a head": eagle / "model", "eagle3": eagle / "head"}


@pytest.fixture(scope="module")
def model_path(directories: dict[str, Path]) -> Path:
    return directories["one key head"]


def make_core(path: Path, **options: Any) -> EngineCore:
    config = configured(path, **{"block_size": 8, **options})
    return EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())


@pytest.mark.parametrize("layout", all_but_long(LAYOUTS, USUAL))
def test_the_tokens_of_one_rank(directories: dict[str, Path], layout: str) -> None:
    """With prefix hits, preemption and an abort; bits depend on no schedule or drafts. A block has the bytes of one
    part."""
    model, options = LAYOUTS[layout]
    options, path = found_in(directories, options), directories[model]
    alone = make_core(path, block_size=16)
    expected, block_bytes = run(alone), alone.stats().block_bytes
    alone.shutdown()
    core = make_core(path, **options)
    try:
        assert run(core) == expected
        stats = core.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_cache_hits_total > 0
        assert (stats.accepted_draft_tokens_total > 0) == ("speculative_config" in options)
        if options.keys().isdisjoint(("pipeline_parallel_size", "speculative_config")):  # other pages
            assert core.ready.block_size == alone.ready.block_size
            assert stats.block_bytes == block_bytes // options["decode_context_parallel_size"]
        preempted = everything(core)
    finally:
        core.shutdown()
    ranks = {name: size for name, size in options.items() if name.endswith("_size") or name == "enable_expert_parallel"}
    core = make_core(path, **ranks, max_prefill_chunk=7, num_blocks_override=300)
    try:
        assert everything(core) == preempted
    finally:
        core.shutdown()


FUZZED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "keys, and a draft model": ("one key head", [{}, DRAFT_MODEL]),
    "latents, and n-gram drafts": ("latents", [{}, NGRAMS]),
    "a head of latents": ("a head", [{}, MTP]),
}
"""Model, and options that change no bit."""


@pytest.mark.long
@pytest.mark.parametrize("case", FUZZED)
def test_random_schedules(directories: dict[str, Path], case: str) -> None:
    model, choices = FUZZED[case]
    found: list[list[Any]] = [[] for _ in range(4)]
    for options in (found_in(directories, {**ALIKE, **choice}) for choice in choices):
        ranks = RankProcesses(configured(directories[model], **options))
        try:
            for seed, way in product(range(len(found)), WAYS):
                config = configured(directories[model], **{**options, "block_size": 8, **way})
                core = EngineCore(config, RankedExecutor(Reused(ranks)), SystemClock(), masks=AllowedByPosition())
                told = outcome(core, seed)
                # Drafts change how many tokens come at once, before their log-probabilities.
                found[seed].append({key: sorted(each, key=lambda x: isinstance(x, int)) for key, each in told.items()})
                core.shutdown()
        finally:
            ranks.close()
    assert all(each == outcomes[0] for outcomes in found for each in outcomes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no divisor": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 3},
        "decode_context_parallel_size=3 must divide tensor_parallel_size=2",
    ),
    "runs": ({**ALIKE, "cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size=3 must divide block_size=16"),
    "plain torch": ({**ALIKE, "attention_backend": "torch"}, "attention_backend='torch' attends to the tokens of one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(model_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        configured(model_path, **options)


def test_models_that_are_refused(tmp_path: Path) -> None:
    """A key head for each rank; windows; states; chosen keys. The sizes that divide are said."""
    for name, size, message in (
        ("qwen2-moe", 2, "leaves no key head on two ranks: .* has 2"),
        ("gpt-oss", 2, "latents alone, and .* has others"),
        ("qwen3-next", 2, "latents alone, and .* has others"),
        ("deepseek-v3.2", 2, "the indexer of .* chooses among all keys"),
    ):
        make = qwen2_moe if name == "qwen2-moe" else FAMILIES[name]
        path = save(randomize(make()), tmp_path / name)
        with pytest.raises(ConfigError, match=f"decode_context_parallel_size={size} is not possible: .*{message}"):
            configured(path, tensor_parallel_size=2, decode_context_parallel_size=size)
    path = save(randomize(llama(num_attention_heads=8, hidden_size=64, num_key_value_heads=2)), tmp_path / "two")
    with pytest.raises(ConfigError, match="2 of 4 ranks hold the same key head, which 4 does not divide: choose 2"):
        configured(path, tensor_parallel_size=4, decode_context_parallel_size=4)
