"""Ranks that share the tokens of prompts: the bits of one rank, and what they exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from quire.clock import VirtualClock
from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.errors import ConfigError
from quire.executors.choice import make_executor
from quire.executors.interface import Executor
from quire.executors.local import LocalExecutor
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.parallel.mesh import Mesh
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.exchange import exchange_of
from quire.worker.platform.cpu import CpuPlatform
from tests.e2e import test_eagle
from tests.e2e.test_head_drafts import leaning
from tests.engine.test_pooling_models import save_encoder
from tests.executors.test_multiprocess import configured, everything, pool
from tests.fakes.masks import AllowedByPosition
from tests.fakes.ranks import Exchange, ThreadRank, run_ranks
from tests.long import all_but_long
from tests.models.encoders import SMALL
from tests.models.families import FAMILIES, llama
from tests.models.harness import randomize, save
from tests.models.head_twins import saved
from tests.models.test_native_ranks import SharedRank
from tests.simulator.test_exchange import CountingRank

SHARED = "prefill_context_parallel_size"
NGRAMS = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}
EAGLE = {"speculative_config": {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3, "adaptive": False}}
DEALT = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
WHOLE = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "preempted, two steps in flight": ("qwen3", {SHARED: 2, "queue_depth": 2}),
    "swapped": (
        "qwen3",
        {SHARED: 2, "preemption_mode": "swap", "swap_space": "16MiB", "max_prefill_chunk": 40},
    ),
    "three ranks of eight bits": ("qwen3", {SHARED: 3, "kv_cache_dtype": "int8", "num_blocks_override": 300}),
    "two threads": ("qwen3", {SHARED: 2, "num_threads": 2, "num_blocks_override": 300}),
    "tensor parallel": ("qwen3", {SHARED: 2, "tensor_parallel_size": 2}),
    "latents in chunks, two steps in flight": (
        "deepseek-v3.2",
        {SHARED: 2, "queue_depth": 2, "max_prefill_chunk": 40},
    ),
    "swapped latents, two threads": (
        "deepseek-v3",
        {SHARED: 2, "num_threads": 2, "preemption_mode": "swap", "swap_space": "16MiB"},
    ),
    "latents of three ranks, weights of eight bits": (
        "deepseek-v2",
        {SHARED: 3, "dtype": "bfloat16", "quantization": "int8", "num_blocks_override": 300},
    ),
    "latents, tensor parallel": ("deepseek-v3.2", {SHARED: 2, "tensor_parallel_size": 2}),
    "drafts": ("qwen3", {SHARED: 2, "queue_depth": 2, **NGRAMS}),
    "a draft model": (
        "qwen3",
        {SHARED: 2, "speculative_config": {"model": "llama", "num_speculative_tokens": 3, "adaptive": False}},
    ),
    "a head of latents": ("a head", {SHARED: 2, **MTP, "queue_depth": 2}),
    "a head that reads layers": ("of a head", {SHARED: 2, **EAGLE}),
    "whole experts": ("qwen3-moe", {SHARED: 2, **WHOLE}),
    "whole experts beside latents": ("deepseek-v3", {SHARED: 2, **WHOLE, "expert_placement_strategy": "round_robin"}),
    "tokens dealt": ("one key head", {SHARED: 2, **DEALT, "queue_depth": 2}),
    "latents dealt": ("deepseek-v3", {SHARED: 2, **DEALT, "cp_kv_cache_interleave_size": 4, "queue_depth": 2}),
    "stages": ("qwen3", {SHARED: 2, "pipeline_parallel_size": 2, "max_prefill_chunk": 40}),
    "stages of latents": ("deepseek-v3.2", {SHARED: 2, "pipeline_parallel_size": 2}),
    "tokens dealt in runs, drafts": (
        "one key head",
        {SHARED: 2, **DEALT, "cp_kv_cache_interleave_size": 4, "num_blocks_override": 300, **NGRAMS},
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3", "llama", "qwen3-moe", "deepseek-v2", "deepseek-v3", "deepseek-v3.2")
    models = {name: FAMILIES[name] for name in names}
    models["one key head"] = lambda: llama(hidden_size=64, num_attention_heads=8, num_key_value_heads=1)
    found = {name: save(randomize(make()), tmp_path_factory.mktemp(name)) for name, make in models.items()}
    found["a head"] = tmp_path_factory.mktemp("head")
    saved("deepseek-v3", found["a head"])
    leaning(found["a head"])
    eagle = tmp_path_factory.mktemp("eagle3")
    test_eagle.saved("eagle3", eagle)
    return {**found, "of a head": eagle / "model", "eagle3": eagle / "head"}


@pytest.fixture(scope="module")
def model_path(directories: dict[str, Path]) -> Path:
    return directories["qwen3"]


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(directory))
    return directory


def scored(core: EngineCore) -> list[Any]:
    """Tokens, log-probabilities and those of the prompt, of three samples of a long prompt beside a short one."""
    for number, count in enumerate((90, 5)):
        params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        prompt = [(7 * place + number) % 97 for place in range(count)]
        made = EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=6, seed=number)
        core.handle(AddRequest(made))
    found: list[Any] = []
    while core.has_work:
        for update in core.step().updates:
            of_prompt = None if update.prompt_logprobs is None else update.prompt_logprobs.entries
            found.append((update.request_id, update.index, update.new_token_ids, update.logprobs, of_prompt))
    return sorted(found, key=lambda each: each[:2])


def make_core(config: EngineConfig, executor: Executor | None = None) -> EngineCore:
    return EngineCore(config, executor or make_executor(config), VirtualClock(), masks=AllowedByPosition())


def in_thread(config: EngineConfig, group: Any, layers: Any = SINGLE_RANK) -> EngineCore:
    """Engine of one rank, which plans as the others do."""
    return make_core(config, LocalExecutor(config, CpuPlatform(config, layers, WHOLE_MODEL, group)))


def results_of(core: EngineCore) -> tuple[Any, Any, EngineCore]:
    try:
        return everything(core), [*scored(core), pool(core, [7] * 61)], core
    finally:
        core.shutdown()


def results(path: Path, options: dict[str, Any]) -> tuple[Any, Any, EngineCore]:
    return results_of(make_core(configured(path, block_size=8, **options)))


MODELS = ["qwen3", "gemma3", "qwen3-moe", "deepseek-v2", "deepseek-v3", "deepseek-v3.2"]


@pytest.mark.parametrize("model", all_but_long(MODELS, ["qwen3", "deepseek-v3.2"]))
def test_the_bits_of_one_rank(tmp_path: Path, model: str) -> None:
    """Of ranks that exchange rows by kernels, and of one of them by torch's collectives; of norms, windows, latents,
    and keys that an indexer chooses."""
    config = configured(save(randomize(FAMILIES[model]()), tmp_path), block_size=8, num_blocks_override=300)
    *expected, _ = results_of(make_core(config))
    memory = allocate(_native.SharedRanks.num_bytes(2))

    def compute(rank: ThreadRank) -> list[list[Any]]:
        return [list(results_of(in_thread(config, group))[:2]) for group in (SharedRank(memory, rank), rank)]

    assert run_ranks(2, compute) == [[expected, expected]] * 2


def found_in(directories: dict[str, Path], options: dict[str, Any]) -> dict[str, Any]:
    drafts = options.get("speculative_config", {})
    if "model" not in drafts:
        return options
    return {**options, "speculative_config": {**drafts, "model": str(directories[drafts["model"]])}}


@pytest.mark.parametrize("layout", all_but_long(LAYOUTS, ["latents in chunks, two steps in flight"]))
def test_the_bits_of_ranks_that_share_no_prompts(directories: dict[str, Path], layout: str) -> None:
    """With prefix hits, chunks beside decodes, several samples, log-probabilities of prompts and a pooled vector;
    preempted where blocks are few."""
    model, options = LAYOUTS[layout]
    options, drafts = found_in(directories, options), options.get("speculative_config", {})
    alone = {name: value for name, value in options.items() if name != SHARED}
    *expected, lone = results(directories[model], alone)
    *found, core = results(directories[model], options)
    assert found == expected
    stats, lone_stats = core.stats(), lone.stats()
    assert stats.prefix_cache_hits_total > 0
    assert (stats.preemptions_total > 0) == ("num_blocks_override" not in options)
    assert (stats.accepted_draft_tokens_total > 0) == bool(drafts)
    assert stats.accepted_draft_tokens_total == lone_stats.accepted_draft_tokens_total


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values": ("qwen3", {}),
    "latents": ("deepseek-v3.2", {}),
    "tensor parallel": ("qwen3", {"tensor_parallel_size": 2}),
    "latents, tensor parallel": ("deepseek-v3.2", {"tensor_parallel_size": 2}),
    "whole experts": ("qwen3-moe", WHOLE),
    "tokens dealt": ("one key head", DEALT),
    "latents dealt": ("deepseek-v3", DEALT),
    "a head of latents": ("a head", MTP),
    "a head that reads layers": ("of a head", EAGLE),
}


@pytest.mark.parametrize("layout", COUNTED)
def test_a_prompt_is_dealt(directories: dict[str, Path], layout: str) -> None:
    """Each rank gives the keys and values, or latents and an indexer's keys, of half of a prompt's tokens, and what a
    head reads: the bytes that `quire plan` states; and one row of hidden states behind the last layer, unless the head
    reads them. Decodes give nothing but sums."""
    model, options = COUNTED[layout]
    config = configured(directories[model], **{SHARED: 2}, **found_in(directories, options))
    size, mesh = config.model.hidden_size, Mesh(config.parallel)
    expected = exchange_of(config.model.shape, config.parallel, head_width=config.speculation.head_width(size))
    exchanges = {group: Exchange(2) for kind in ("tp", "pcp") for group in mesh.groups(kind)}
    request = EngineRequest(
        request_id="0",
        prompt_token_ids=list(range(64)),
        params=SamplingParams(temperature=0),
        max_tokens=3,
        seed=0,
    )

    def compute(rank: ThreadRank) -> tuple[list[int], int, int]:
        place = mesh.place(rank.rank)
        shared, layers = (
            CountingRank(ThreadRank(exchanges[mesh.group_of(rank.rank, kind)], number))
            for kind, number in (("pcp", place.pcp), ("tp", place.tp))
        )
        core = in_thread(config, shared, layers if config.parallel.tp > 1 else SINGLE_RANK)
        core.handle(AddRequest(request))
        tokens: list[int] = []
        of_decodes = 0
        while core.has_work:
            before, is_decode = layers.num_bytes, bool(tokens)
            tokens += [token for update in core.step().updates for token in update.new_token_ids]
            of_decodes += is_decode * (layers.num_bytes - before)
        core.shutdown()
        return tokens, shared.num_bytes, of_decodes

    found = run_ranks(mesh.num_ranks, compute)
    of_prompt = 32 * expected.prompt + (0 if options is MTP else torch.float32.itemsize * size)
    assert found == [(found[0][0], of_prompt, 2 * expected.within)] * mesh.num_ranks


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no rank": ({SHARED: 0}, "prefill_context_parallel_size must be at least 1"),
    "many ranks": ({SHARED: 32, "tensor_parallel_size": 4}, "must be at most 64, not 128"),
    "plain torch": ({SHARED: 2, "attention_backend": "torch"}, "attends to the rows of one rank"),
    "one process": ({SHARED: 2, "distributed_executor_backend": "uni"}, "one process is one rank"),
}


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    return save(randomize(model), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(wide_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        configured(wide_path, **options)


OF_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "states": ("qwen3-next", {}, "states would wait for those of the tokens before"),
    "expanded latents": ("deepseek-v3", {"mla_prompt": "expanded"}, "choose mla_prompt='absorbed'"),
    "moving experts": ("qwen3-moe", {**WHOLE, "enable_eplb": True}, "enable_eplb needs the rows of all tokens"),
}


@pytest.mark.parametrize("case", OF_MODELS)
def test_models_that_are_refused(tmp_path: Path, case: str) -> None:
    name, options, message = OF_MODELS[case]
    path = save(randomize(FAMILIES[name]()), tmp_path)
    with pytest.raises(ConfigError, match=f"{SHARED}=2 is not possible: .*{message}"):
        configured(path, **{SHARED: 2}, **options)


def test_encoders_are_refused(tmp_path: Path) -> None:
    path = save_encoder(randomize(BertForSequenceClassification(BertConfig(**SMALL, num_labels=3))), tmp_path)
    with pytest.raises(ConfigError, match=f"{SHARED}=2 is not possible: .* attends in both directions"):
        configured(path, num_blocks_override=None, **{SHARED: 2})
