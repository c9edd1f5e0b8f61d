"""Heads for drafts, against their definition over Transformers' layer in float64."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.attention.native_backend import NativeAttention
from quire.cli.plan import main as plan
from quire.config.hf_config import ModelChoices, load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from tests.models.harness import PagedRunner, random_prompts, randomize, save
from tests.models.head_twins import CASES, SIZE, Twin, add, following, saved
from tests.models.hybrid_families import qwen3_5_vision


class Drafting:
    """A model whose logits are those of the guesses, for the runner of the tests."""

    def __init__(self, model) -> None:  # type: ignore[no-untyped-def]
        self.model, self.head = model, model.draft_head
        self.compute_logits = self.head.compute_logits

    def cache_specs(self) -> list[LayerSpec]:
        return [*self.model.cache_specs(), *self.head.cache_specs()]

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        hidden = self.model.forward(batch).hidden
        return self.head.forward(batch._replace(token_ids=following(batch.token_ids)).having(hidden))


def loaded(directory: Path, *, native: bool = False, drafts: bool = True, quantization: str | None = None):  # type: ignore[no-untyped-def]
    config = load_model_config(
        str(directory),
        dtype="float32",
        max_model_len=None,
        revision=None,
        config_only=False,
        choices=ModelChoices(load_draft_head=drafts),
    )
    return load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 2) if native else None)


def runner(model, num_heads: int, *, native: bool) -> PagedRunner:  # type: ignore[no-untyped-def]
    made = PagedRunner(model)
    if native:
        made.backend = NativeAttention(made.layout, made.pages, "float32", num_heads, 2)
    return made


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_guesses_are_those_of_the_definition(name: str, native: bool, tmp_path: Path) -> None:
    hf, twin = saved(name, tmp_path)
    model = loaded(tmp_path, native=native)
    prompts = random_prompts([30, 11], 97)
    num_heads = hf.config.num_attention_heads
    drafting = runner(Drafting(model), num_heads, native=native)
    rows = [drafting.add(prompt) for prompt in prompts]
    logits = [drafting.step([(rows[0], 17), (rows[1], 11)])]
    logits = [[part.clone() for part in logits[0]], drafting.step([(rows[0], 13)])]
    for each in (hf, twin.body):
        each.set_experts_implementation("eager")  # the other ones compute in at most 32 bits
    hf.double(), twin.double()
    for found, prompt in zip((torch.cat((logits[0][0], logits[1][0])), logits[0][1]), prompts, strict=True):
        expected = twin(hf, prompt)
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)
    without = runner(loaded(tmp_path, native=native, drafts=False), num_heads, native=native)
    with_head = runner(model, num_heads, native=native)
    own = [each.step([(each.add(prompts[0]), 30)])[0].clone() for each in (without, with_head)]
    assert torch.equal(*own), "the model's own logits"


def test_the_head_counts_as_weights_and_takes_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _, twin = saved("moe", tmp_path)
    with caplog.at_level(logging.INFO):
        model, without = loaded(tmp_path), loaded(tmp_path, drafts=False)
    elements = sum(value.numel() for value in twin.tensors().values())
    assert model.weight_bytes() == without.weight_bytes() + 4 * elements
    assert model.cache_specs() == without.cache_specs()
    assert "of the weights are the head for drafts" in caplog.text
    assert f"the head for drafts ({len(twin.tensors())} tensors, mtp.*) is left out" in caplog.text
    assert plan([str(tmp_path), "--load-draft-head"]) == 0
    assert f"; {elements:,} of them are the head for drafts" in capsys.readouterr().out


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    saved("dense", tmp_path)
    path, tensor = tmp_path / "model.safetensors", "mtp.layers.0.self_attn.k_proj.weight"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != tensor}, path)
    with pytest.raises(ModelLoadError, match=f"'{tensor}' missing"):
        loaded(tmp_path)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(SIZE, SIZE)}, path)
    with pytest.raises(ModelLoadError, match=r"'mtp\.fc\.weight' has shape \[48, 48\]"):
        loaded(tmp_path)
    save_file(tensors | {"mtp.layers.900.norm.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelLoadError, match="a head for drafts of 901 layers"):
        loaded(tmp_path)


def test_a_model_of_several_modalities_keeps_its_head(tmp_path: Path) -> None:
    save(randomize(qwen3_5_vision()), tmp_path)
    add(tmp_path, Twin(CASES["tied"]))
    assert loaded(tmp_path).draft_head is not None
