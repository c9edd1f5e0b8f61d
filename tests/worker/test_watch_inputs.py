"""What matrices are multiplied with over a text, against Transformers' own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.hf_config import load_model_config
from quire.models.gguf.make import open_weights
from quire.worker import watch_inputs as module
from quire.worker.watch_inputs import watch_inputs
from tests.models.dense_families import gemma3
from tests.models.families import llama, qwen3, qwen3_moe
from tests.models.harness import random_prompts, randomize, save

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "qwen3": qwen3,
    "gemma3-windows": gemma3,
}


def test_experts_have_the_squares_of_the_tokens_that_chose_them(tmp_path: Path) -> None:
    model = randomize(qwen3_moe(norm_topk_prob=True))
    directory = save(model, tmp_path)
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    config, files = open_weights(config)
    (token_ids,) = random_prompts([60], 97)
    found = watch_inputs(config, files, token_ids, lambda part, total: None)
    inputs: list[torch.Tensor] = []
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _module, arguments: inputs.append(arguments[0].flatten(0, -2)))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
        (x,) = inputs
        chosen = mlp.gate.weight.matmul(x.T).T.topk(config.shape.layers[1].experts.num_active, dim=1).indices
    for expert in range(config.shape.layers[1].experts.num_experts):
        rows = x[(chosen == expert).any(1)]
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert (name in found) == bool(len(rows))
        if len(rows):
            assert torch.allclose(found[name], rows.square().mean(0), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", list(MODELS))
def test_mean_squares_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pieces of 40 tokens, the last of which is shorter."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", 40)
    model = randomize(MODELS[name]())
    directory = save(model, tmp_path)
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    (token_ids,) = random_prompts([90], 97)
    done = []
    config, files = open_weights(config)
    found = watch_inputs(config, files, token_ids, lambda part, total: done.append((part, total)))
    assert done == [(40, 90), (80, 90), (90, 90)]

    sums: dict[str, torch.Tensor] = {}

    def watch(title: str) -> Callable[..., None]:
        def add(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            sums[title] = sums.get(title, torch.zeros(())) + inputs[0].flatten(0, -2).double().square().sum(0)

        return add

    for title, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and title != "lm_head":
            layer.register_forward_pre_hook(watch(f"{title}.weight"))
    with torch.no_grad():
        for first in (0, 40, 80):
            model(torch.tensor([token_ids[first : first + 40]]))
    assert found.keys() == sums.keys()
    for title, mean in found.items():
        assert torch.allclose(mean, (sums[title] / 90).float(), rtol=1e-3, atol=1e-6), title
