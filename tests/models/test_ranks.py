"""Models that ranks share: each loads and reads its share, and together they compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.attention import torch_backend
from quire.attention.expanded import Prompt
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ConfigError, ModelLoadError
from quire.models import loader
from quire.models.decoder import Decoder
from quire.models.loader import load_model
from quire.models.weight_files import WeightFiles, find_weights
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from tests.fakes.ranks import run_ranks
from tests.long import one_in
from tests.models.conftest import SavedModel
from tests.models.dense_families import DENSE_FAMILIES, DENSE_SAMPLE
from tests.models.families import FAMILIES, deepseek_v3, llama
from tests.models.harness import PagedRunner, chunked_logits, random_prompts, randomize, save
from tests.models.hybrid_families import HYBRID_FAMILIES

SavedModels = Callable[[str], SavedModel]
PROMPTS = random_prompts([20, 7], 97)


def load_share(
    directory: Path, group: ProcessGroup, load_format: str = "auto", *, expands_prompts: bool = False
) -> Decoder:
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    config = replace(config, expands_prompts=expands_prompts)
    return load_model(config, LoadConfig(load_format, 0), group=group)


def logits_of(model: Decoder) -> torch.Tensor:
    return torch.cat(chunked_logits(PagedRunner(model), PROMPTS, chunk=9))


def shared_logits(directory: Path, size: int, load_format: str = "auto") -> list[torch.Tensor]:
    return run_ranks(size, lambda group: logits_of(load_share(directory, group, load_format)))


# Layers that keep a state refuse several ranks (tests/models/test_hybrid_checkpoints.py).
OTHERS = {"gpt2-variant", *DENSE_FAMILIES, *HYBRID_FAMILIES}
SHARED = [*(name for name in FAMILIES if name not in OTHERS), *DENSE_SAMPLE]


@pytest.mark.parametrize("family", one_in(2, SHARED))
def test_two_ranks_compute_what_one_does(saved_model: SavedModels, family: str) -> None:
    directory = saved_model(family).directory
    expected = logits_of(load_share(directory, SINGLE_RANK))
    first, second = shared_logits(directory, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=2e-3, rtol=1e-4)


def test_prompts_of_latent_attention_that_two_ranks_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps and expands the matrices of its own heads, here in parts of 2."""
    monkeypatch.setattr("quire.layers.latent_attention.EXPANDED_HEADS", 2)
    starts: list[int] = []
    find = torch_backend.expanded_prompts

    def found(*arguments: Any) -> list[Prompt]:
        prompts = find(*arguments)
        starts.extend(prompt.start for prompt in prompts)
        return prompts

    monkeypatch.setattr(torch_backend, "expanded_prompts", found)
    directory = save(randomize(deepseek_v3(num_hidden_layers=2, qk_nope_head_dim=4, v_head_dim=8)), tmp_path)
    absorbed = logits_of(load_share(directory, SINGLE_RANK))
    assert not starts
    expected = logits_of(load_share(directory, SINGLE_RANK, expands_prompts=True))
    num_expanded = len(starts)
    first, second = run_ranks(2, lambda group: logits_of(load_share(directory, group, expands_prompts=True)))
    assert len(starts) == 3 * num_expanded > 0
    assert torch.equal(first, second)
    for other in (expected, absorbed):
        torch.testing.assert_close(first, other, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
def test_fewer_kv_heads_than_ranks(num_kv_heads: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    directory = save(randomize(llama(**sizes)), tmp_path)
    expected = logits_of(load_share(directory, SINGLE_RANK))
    for logits in shared_logits(directory, 4):
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)


def test_random_weights_are_those_of_one_rank(saved_model: SavedModels) -> None:
    directory = saved_model("llama").directory
    expected = logits_of(load_share(directory, SINGLE_RANK, "dummy"))
    for logits in shared_logits(directory, 2, "dummy"):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_size_that_does_not_divide_the_model(saved_model: SavedModels) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 is not possible for .* 101 rows") as told:
        shared_logits(saved_model("gpt2-variant").directory, 2)
    assert told.value.param == "tensor_parallel_size"


def test_a_rank_holds_its_share(saved_model: SavedModels) -> None:
    directory = saved_model("llama").directory
    whole = load_share(directory, SINGLE_RANK).weight_bytes()
    shares = run_ranks(2, lambda group: load_share(directory, group).weight_bytes())
    norms = sum(4 * 48 for _ in range(2 * 3 + 1))
    assert sum(shares) == whole + norms


def bytes_read(directory: Path, group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> int:
    found: list[WeightFiles] = []

    def find(path: Path, load_format: str) -> WeightFiles:
        files = find_weights(path, load_format)
        assert isinstance(files, WeightFiles)
        found.append(files)
        return files

    monkeypatch.setattr(loader, "find_weights", find)
    load_share(directory, group)
    return sum(files.bytes_read.total for files in found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_rank_reads_its_share(saved_model: SavedModels, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt2: query, key and value in one matrix, and matrices with the inputs first."""
    directory = saved_model(family).directory
    stored = load_file(directory / "model.safetensors")
    model = load_share(directory, SINGLE_RANK)
    whole = sum(stored[name].nbytes for name in model.slots)
    assert bytes_read(directory, SINGLE_RANK, monkeypatch) == whole
    shares = [bytes_read(directory, group, monkeypatch) for group in run_ranks(2, lambda group: group)]
    # Norms, learned positions and biases of outputs are the only tensors that are not shared out.
    vectors = sum(tensor.nbytes for name, tensor in stored.items() if "norm" in name or "ln_" in name)
    repeated = vectors + sum(tensor.nbytes for name, tensor in stored.items() if "wpe" in name)
    assert sum(shares) == whole + repeated
    assert max(shares) < 0.6 * whole


def test_a_tensor_of_another_stage_is_not_read(saved_model: SavedModels) -> None:
    """As a pipeline stage loads: the model has slots for some of the checkpoint's tensors."""
    directory = saved_model("llama").directory
    model = load_share(directory, SINGLE_RANK, "dummy")
    names = list(model.slots)
    model.slots = {name: slot for name, slot in model.slots.items() if "layers.2" not in name}
    files = find_weights(directory, "auto")
    assert isinstance(files, WeightFiles)
    with torch.inference_mode():
        with pytest.raises(ModelLoadError, match=r"tensor 'model.layers.2\S+' does not belong to this model"):
            model.load_weights(files.stream(lambda done, total: None))
        files.bytes_read.total = 0
        model.load_weights(files.stream(lambda done, total: None), elsewhere=names)
    stored = load_file(directory / "model.safetensors")
    assert files.bytes_read.total == sum(stored[name].nbytes for name in model.slots)


def test_an_unknown_tensor_is_refused_on_every_rank(tmp_path: Path) -> None:
    directory = save(randomize(FAMILIES["llama"]()), tmp_path)
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, "model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}, directory / "model.safetensors")
    for group in run_ranks(2, lambda group: group):
        with pytest.raises(ModelLoadError, match=r"'model.layers.9.mlp.up_proj.weight' does not belong"):
            load_share(directory, group)
