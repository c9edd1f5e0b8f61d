"""What experts compute, by the option `expert_counts`: equal to a count made from the router of Transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError
from quire.kv_cache.stats import EngineStats, add_up
from tests.e2e.device_models import greedy, open_engine, run
from tests.models.harness import random_prompts

PROMPTS = random_prompts([37, 1, 20], 97, seed=9)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
LAYERS = {"qwen2-moe": [0], "qwen3-moe": [0, 1]}
"""Those with experts; of the last layer of the model the rows that are read are computed alone."""


def routed(reference: Any, layers: list[int], tokens: list[int], first_read: int) -> dict[int, torch.Tensor]:
    """Rows of each expert, for the tokens that were computed, of which those from `first_read` on were read."""
    counts: dict[int, torch.Tensor] = {}

    def count(layer: int, gate: Any, x: torch.Tensor) -> None:
        rows = x.flatten(0, -2)
        rows = rows[first_read:] if layer == len(reference.model.layers) - 1 else rows
        chosen = (rows @ gate.weight.t()).topk(reference.config.num_experts_per_tok).indices.flatten()
        counts[layer] = torch.bincount(chosen, minlength=len(gate.weight))

    hooks = [
        reference.model.layers[layer].mlp.gate.register_forward_hook(
            lambda gate, inputs, _, layer=layer: count(layer, gate, inputs[0])
        )
        for layer in layers
    ]
    with torch.inference_mode():
        reference(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("family", list(LAYERS))
@pytest.mark.parametrize(
    "options", [{}, {"attention_backend": "torch", "queue_depth": 2}, {"quantization": "fp8", "max_prefill_chunk": 7}]
)
def test_counts_are_those_of_the_router(family: str, options: dict[str, Any], saved_model: Any) -> None:
    saved, layers = saved_model(family), LAYERS[family]
    options = {"num_blocks_override": 60, "max_num_batched_tokens": 64, "num_threads": 2, **options}
    llm = LLM(model=str(saved.directory), skip_tokenizer_init=True, expert_counts=True, **options)
    sizes = {layer: saved.reference.model.layers[layer].mlp.gate.weight.shape[0] for layer in layers}
    assert llm.stats()["expert_counts"] == {layer: [0] * size for layer, size in sizes.items()}
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    counted = llm.stats()["expert_counts"]
    assert list(counted) == layers
    whole = dict.fromkeys(layers, 0)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
        for layer, count in routed(saved.reference, layers, tokens, len(prompt) - 1).items():
            whole[layer] = whole[layer] + count
    for layer in layers:
        if options.get("quantization") is None:
            assert counted[layer] == whole[layer].tolist()
        elif layer == 0:  # rounded weights route some rows elsewhere
            assert sum(counted[layer]) == int(whole[layer].sum())
    llm.shutdown()


def test_nothing_is_counted_unasked(saved_model: Any) -> None:
    llm = LLM(model=str(saved_model("qwen3-moe").directory), skip_tokenizer_init=True, num_blocks_override=20)
    llm.generate([{"prompt_token_ids": PROMPTS[1]}], PARAMS)
    assert llm.stats()["expert_counts"] is None
    llm.shutdown()


@pytest.mark.long
def test_two_ranks_count_each_row_once(saved_model: Any) -> None:
    counted = []
    for ranks in (1, 2):
        llm = LLM(
            model=str(saved_model("qwen3-moe").directory),
            skip_tokenizer_init=True,
            expert_counts=True,
            attention_backend="torch",
            num_blocks_override=20,
            num_threads=1,
            tensor_parallel_size=ranks,
        )
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS)
        counted.append(llm.stats()["expert_counts"])
        llm.shutdown()
    assert counted[0] == counted[1]


def test_counts_of_engines_add_up() -> None:
    each = [
        EngineStats(num_blocks=2, expert_counts={1: [1, 2], 4: [3, 0]}),
        EngineStats(expert_counts={1: [5, 0], 4: [0, 1]}),
    ]
    assert add_up(each).expert_counts == {1: [6, 2], 4: [3, 1]}
    assert add_up([EngineStats(), EngineStats()]).expert_counts is None


def test_a_model_without_experts_is_refused(saved_model: Any) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        resolve(EngineOptions(model=str(saved_model("llama").directory), expert_counts=True))


def test_a_device_counts(saved_model: Any) -> None:
    saved, prompt = saved_model("qwen3-moe"), PROMPTS[0][:5]
    with open_engine(saved.directory, expert_counts=True, enable_prefix_caching=False) as llm:
        (output,) = run(llm, [prompt], greedy(3))
        counted = llm.stats()["expert_counts"]
    tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
    whole = routed(saved.reference, LAYERS["qwen3-moe"], tokens, len(prompt) - 1)
    assert counted == {layer: count.tolist() for layer, count in whole.items()}
