"""Checkpoints of Qwen 3.5 and Qwen3-Next: experts in one tensor, more than one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ConfigError
from quire.models.loader import load_model
from tests.models.conftest import SavedModel
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts


def test_experts_in_one_tensor(saved_model: Callable[[str], SavedModel], tmp_path) -> None:  # type: ignore[no-untyped-def]
    saved = saved_model("qwen3.5-moe")
    tensors = load_file(saved.directory / "model.safetensors")
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    assert layers, "the checkpoint keeps experts one by one"
    for layer in layers:
        own = {
            part: [tensors.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in range(6)]
            for part in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(own["gate"], own["up"], strict=True)]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(own["down"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((saved.directory / "config.json").read_text())
    prompts = random_prompts([20], 97)
    (expected,) = chunked_logits(PagedRunner(load(saved.directory)[1]), prompts, chunk=20)
    _, model = load(tmp_path)
    (logits,) = chunked_logits(PagedRunner(model), prompts, chunk=20)
    assert torch.equal(logits, expected)


class SixRanks:
    rank, size = 0, 6


def test_ranks_that_do_not_divide_the_heads_of_states_are_refused(saved_model: Callable[[str], SavedModel]) -> None:
    directory = str(saved_model("qwen3.5").directory)
    config = load_model_config(directory, dtype="float32", max_model_len=None, revision=None, config_only=False)
    with pytest.raises(ConfigError, match="tensor_parallel_size=6 is not possible for this model: it does not divide"):
        load_model(config, LoadConfig("dummy", 0), group=SixRanks())
