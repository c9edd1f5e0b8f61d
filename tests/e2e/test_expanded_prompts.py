"""Latent attention whose prompts are expanded (`mla_prompt`): Transformers' tokens, and nearly the absorbed form's
log-probabilities, in chunks, behind prefix hits, preempted, beside single tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from quire import LLM
from quire.attention.device_batch import NO_PROMPTS, HostColumns
from quire.attention.expanded import Prompt
from quire.attention.triton_expanded import DeviceExpansion
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError
from quire.kernels.arguments import LatentExpansion, LatentShape
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.outputs import RequestOutput
from tests.e2e.device_models import OPTIONS, continuation, greedy, run
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.families import deepseek_v2, deepseek_v3
from tests.models.harness import random_prompts, randomize, save

SMALL_HEADS: dict[str, Any] = {"num_hidden_layers": 2, "qk_nope_head_dim": 4, "v_head_dim": 8}
"""Chunks of 7 tokens are cheaper expanded."""
PROMPTS = random_prompts([40, 3, 23, 61], 97, seed=8)
NUM_TOKENS = 5
CPU = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True, "block_size": 4, "max_prefill_chunk": 7}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, Path]]:
    made = {}
    for name, make in {"v2": deepseek_v2, "v3": deepseek_v3}.items():
        reference = randomize(make(**SMALL_HEADS, **({"q_lora_rank": None} if name == "v2" else {})))
        made[name] = reference, save(reference, tmp_path_factory.mktemp(name))
    return made


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads come in parts of 4, keys in pieces of 16, and first positions of what is expanded are listed."""
    monkeypatch.setattr("quire.layers.latent_attention.EXPANDED_HEADS", 4)
    monkeypatch.setattr("quire.layers.latent_attention.EXPANDED_HEADS", 4)
    for module in ("expanded", "native_expanded"):
        monkeypatch.setattr(f"quire.attention.{module}.PIECE_KEYS", 16)
    monkeypatch.setattr("quire.attention.expanded.TILE_ROWS", 4)
    starts: list[int] = []
    for module in ("torch_backend", "native_expanded", "triton_expanded"):
        find = importlib.import_module(f"quire.attention.{module}").expanded_prompts

        def found(*arguments: Any, find: Callable[..., list[Prompt]] = find) -> list[Prompt]:
            prompts = find(*arguments)
            starts.extend(prompt.start for prompt in prompts)
            return prompts

        monkeypatch.setattr(f"quire.attention.{module}.expanded_prompts", found)
    return starts


def assert_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for token, left, right in zip(
            one.outputs[0].token_ids, one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True
        ):
            assert left[token].logprob == pytest.approx(right[token].logprob, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "backend"),
    all_but_long(
        [("v2", "native"), ("v3", "native"), ("v2", "torch"), ("v3", "torch")], [("v2", "native"), ("v3", "native")]
    ),
    ids=lambda text: text,
)
def test_on_a_cpu(
    name: str, backend: str, models: dict[str, tuple[PreTrainedModel, Path]], expanded: list[int]
) -> None:
    reference, directory = models[name]
    params = greedy(NUM_TOKENS, logprobs=0)
    options: dict[str, Any] = {**CPU, "attention_backend": backend}
    with LLM(str(directory), num_blocks_override=60, **options) as llm:
        absorbed = run(llm, PROMPTS, params)
    assert not expanded
    with LLM(str(directory), num_blocks_override=60, mla_prompt="expanded", **options) as llm:
        first, again = run(llm, PROMPTS, params), run(llm, PROMPTS, params)
    assert {0, 7, 14} <= set(expanded)
    assert [each.num_cached_tokens for each in again] == [36, 0, 20, 60]
    with LLM(str(directory), num_blocks_override=24, mla_prompt="expanded", **options) as llm:
        preempted = run(llm, PROMPTS, params)
        assert llm.stats()["preemptions_total"] > 0
    assert [each.outputs[0].token_ids for each in first] == [
        continuation(reference, prompt, NUM_TOKENS) for prompt in PROMPTS
    ]
    for outputs in (first, again, preempted):
        assert_close(outputs, absorbed)


@pytest.mark.long
def test_on_a_device(tmp_path: Path, expanded: list[int]) -> None:
    """Without batch invariance prompts are expanded there by themselves. Graphs are of decodes, and of what lies
    between the layers' attention."""
    reference = randomize(deepseek_v3(**{**SMALL_HEADS, "num_hidden_layers": 1}))
    directory, executor = save(reference, tmp_path), "tests.fakes.graph_worker:GraphExecutor"
    options = {**OPTIONS, "max_model_len": 64, "max_num_batched_tokens": 16}
    outputs = {}
    for mode in ("auto", "absorbed"):
        keywords = EngineOptions.from_keywords({"model": str(directory), **options, "mla_prompt": mode})
        with LLM.from_options(keywords, executor=executor) as llm:
            if mode == "absorbed":
                assert expanded
                expanded.clear()
            outputs[mode] = run(llm, PROMPTS[1:3], greedy(3, logprobs=0))
            (capture,) = llm._client._core._executor.platform.captures  # type: ignore[attr-defined]
            assert any(graph.num_replays for graph in capture.graphs)
    assert not expanded
    assert_close(outputs["auto"], outputs["absorbed"])
    expected = [continuation(reference, prompt, 3) for prompt in PROMPTS[1:3]]
    assert [each.outputs[0].token_ids for each in outputs["auto"]] == expected


def test_a_few_tokens_behind_a_long_context_stay_absorbed() -> None:
    """DeepSeek-V3: fewer multiplications from 171 tokens on, or without a context."""
    rule = LatentExpansion(128, 128, 16, len, len, ()).rule(LatentShape(0, 128, 512, 64, 1.0))
    tokens, starts = np.array([1, 100, 170, 171, 172, 2]), np.array([10**6, 10**6, 10**6, 10**6, 10**6, 0])
    assert rule.pays(tokens, starts).tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"mla_prompt": "expanded"}, "LlamaForCausalLM has no latent attention"),
        ("llama", {"mla_prompt": "absorbed"}, "LlamaForCausalLM has no latent attention"),
        ("deepseek-v3.2", {"mla_prompt": "expanded"}, "has an indexer, which chooses other keys for each token"),
        ("deepseek-v3", {"mla_prompt": "expande"}, "mla_prompt must be one of"),
    ],
)
def test_what_cannot_be_expanded(
    family: str, options: dict[str, Any], message: str, saved_model: Callable[[str], SavedModel]
) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        resolve(EngineOptions(model=str(saved_model(family).directory), **options))
    assert told.value.param == "mla_prompt"


def test_by_itself_only_where_bits_may_depend_on_the_batch(models: dict[str, tuple[PreTrainedModel, Path]]) -> None:
    directory = str(models["v3"][1])
    assert not resolve(EngineOptions(model=directory, device="cpu", attention_backend="native")).model.expands_prompts
    device = EngineOptions.from_keywords({"model": directory, **OPTIONS})
    assert resolve(device).model.expands_prompts
    invariant = EngineOptions.from_keywords({"model": directory, **OPTIONS, "batch_invariant": True})
    assert not resolve(invariant).model.expands_prompts


def test_sequences_with_drafts_are_not_expanded() -> None:
    """On a device, where the host knows an upper bound of their start; a graph serves steps with any prompts."""
    expansion: Any = SimpleNamespace(rule=lambda _: SimpleNamespace(pays=lambda counts, starts: counts > 0))
    step: Any = SimpleNamespace(max_query_len=9)
    places = np.array([0, 9, 18, 27]), np.array([0, 3, 5])
    for host, expected in ((HostColumns(*places, np.array([0, 8, 0])), [0, 2]), (HostColumns(*places), [0, 1, 2])):
        step.host = host
        found = DeviceExpansion(64, DeviceLimits())._prompts(None, expansion, step)  # type: ignore[arg-type]
        assert [each.sequence for each in found] == expected
    step.host = NO_PROMPTS
    assert DeviceExpansion(64, DeviceLimits())._prompts(None, expansion, step) == []  # type: ignore[arg-type]
