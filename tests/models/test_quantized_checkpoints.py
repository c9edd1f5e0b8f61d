"""Whole quantised models: a tiny LLaMA saved in each format loads and says what its dequantised weights say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from tests.models.harness import random_prompts, randomize, save
from tests.quantization import packers
from tests.quantization.packers import Matrix, Tensors, random_matrix

VOCABULARY = 89
PROMPTS = random_prompts([5, 11, 30], VOCABULARY)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(layout: str, weights: dict[str, object], activations: object = None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


GROUPS = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

Pack = Callable[[Matrix], Tensors]
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], Pack]] = {
    "gptq": (GPTQ, {}, packers.gptq),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, {}, lambda matrix: packers.gptq(matrix, version=2)),
    "gptq-8-bit-rows": ({**GPTQ, "bits": 8, "group_size": -1}, {"bits": 8, "group_size": None}, packers.gptq),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, {"reordered": True}, packers.gptq),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32},
        {},
        packers.gptq,
    ),
    "awq": (AWQ, {}, packers.awq),
    "pack-quantized": (
        compressed("pack-quantized", GROUPS),
        {},
        lambda matrix: packers.pack_quantized(matrix, zero_points=True),
    ),
    "int-quantized": (
        compressed("int-quantized", CHANNEL),
        {"bits": 8, "group_size": None, "symmetric": True},
        lambda matrix: packers.int_quantized(matrix, zero_points=False),
    ),
}
SETTINGS: dict[str, Any] = {"bits": 4, "group_size": 32, "symmetric": False, "reordered": False}


def tiny_llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return randomize(LlamaForCausalLM(config))


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_pair(
    directory: Path, model: PreTrainedModel, quantization: dict[str, Any], settings: dict[str, Any], pack: Pack
) -> tuple[Path, Path]:
    """The model with random quantised matrices, packed, and the same with the matrices' definition in float32."""
    settings = {**SETTINGS, **settings}
    plain = save(model, directory / "plain")
    packed = Path(shutil.copytree(plain, directory / "packed"))
    weights = load_file(plain / "model.safetensors")
    tensors, dense = {}, {}
    for seed, (name, weight) in enumerate(sorted(weights.items())):
        if not is_linear(name):
            tensors[name] = dense[name] = weight
            continue
        rows, columns = weight.shape
        options = {**settings, "group_size": settings["group_size"] or columns}
        matrix = random_matrix(rows, columns, seed=seed, **options)
        matrix.scales = (matrix.scales * 4).half().float()
        dense[name] = matrix.definition().float()
        for part, tensor in pack(matrix).items():
            tensors[f"{name.removesuffix('.weight')}.{part}"] = tensor
    save_file(tensors, packed / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    change_config(packed, quantization)
    return packed, plain


def change_config(directory: Path, quantization: dict[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def greedy(directory: Path) -> list[tuple[int, ...]]:
    with LLM(model=directory, skip_tokenizer_init=True, dtype="float32", num_blocks_override=64) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path, tiny_llama(), *FORMATS[name])
    tokens = greedy(packed)
    assert tokens == greedy(plain)
    assert len({token for row in tokens for token in row}) > 5


def load(directory: Path, dtype: str = "float32") -> Any:
    config = load_model_config(str(directory), dtype=dtype, max_model_len=None, revision=None, config_only=False)
    return load_model(config, LoadConfig("auto", 0), SINGLE_RANK)


def test_gpt2_keeps_quantised_matrices_output_first(tmp_path: Path) -> None:
    """Plain GPT-2 checkpoints are [in, out], GPTQ ones [out, in] like those of every other family."""
    model = randomize(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2)))
    plain = save(model, tmp_path / "plain")
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    weights = load_file(plain / "model.safetensors")
    tensors = dict(weights)
    for name in [name for name in weights if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))]:
        matrix = random_matrix(weights[name].shape[1], weights[name].shape[0], 4, 32)
        weights[name] = matrix.definition().float().t().contiguous()
        del tensors[name]
        tensors |= {f"{name.removesuffix('.weight')}.{part}": part_of for part, part_of in packers.gptq(matrix).items()}
    save_file(weights, plain / "model.safetensors")
    save_file(tensors, packed / "model.safetensors")
    change_config(packed, GPTQ)
    assert greedy(packed) == greedy(plain)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ model."""
    return write_pair(tmp_path_factory.mktemp("sound"), tiny_llama(), *FORMATS["gptq"])[0]


@pytest.fixture
def packed(sound: Path, tmp_path: Path) -> Path:
    """A GPTQ model that a test may break."""
    return Path(shutil.copytree(sound, tmp_path / "packed"))


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


UP = "model.layers.1.mlp.up_proj"


def test_biases_of_zeros_that_the_model_does_not_have_are_passed_over(packed: Path) -> None:
    expected = greedy(packed)
    rewrite(packed, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(96)}))
    assert greedy(packed) == expected
    rewrite(packed, lambda tensors: tensors[f"{UP}.bias"].fill_(0.5))
    with pytest.raises(ModelLoadError, match=f"'{UP}.bias' does not belong to this model"):
        load(packed)


def test_a_quantised_vocabulary_projection(packed: Path) -> None:
    matrix = random_matrix(88, 64, 4, 32)
    rewrite(
        packed,
        lambda tensors: [
            tensors.pop("lm_head.weight"),
            tensors.update({f"lm_head.{part}": tensor for part, tensor in packers.gptq(matrix).items()}),
        ],
    )
    with pytest.raises(ModelLoadError, match=r"'lm_head.weight' has shape \[88, 64\], .* asks for \[89, 64\]"):
        load(packed)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "vocab_size": 88}))
    rewrite(
        packed,
        lambda tensors: tensors.update(
            {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:88].contiguous()}
        ),
    )
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = hidden.double() @ matrix.definition().t()
    torch.testing.assert_close(load(packed).compute_logits(hidden).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.qzeros"), f"tensor '{UP}.qzeros' missing"),
        (lambda t: t.pop(f"{UP}.qweight"), f"tensor '{UP}.qweight' missing"),
        (lambda t: [t.pop(f"{UP}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")],
         f"tensor '{UP}.weight' missing"),
        (lambda t: t.update({f"{UP}.scales": torch.ones(2, 8)}), rf"tensor '{UP}.scales' is \[2, 8\] of float32"),
        (lambda t: t.update({f"{UP}.weight": torch.ones(96, 64)}), f"tensor '{UP}.weight' occurs twice"),
        (lambda t: t.update({f"x.{part}": t[f"{UP}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}),
         "tensor 'x.weight' does not belong to this model"),
    ],
)  # fmt: skip
def test_wrong_parts_are_named(change: Callable[[Tensors], object], message: str, packed: Path) -> None:
    rewrite(packed, change)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(packed)
    assert str(packed) in str(raised.value)


def test_integers_without_a_quantization_config(packed: Path) -> None:
    change_config(packed, None)
    with pytest.raises(ModelLoadError, match=r"\.(g_idx|qweight|qzeros|scales)' does not belong to this model"):
        load(packed)


def test_a_norm_cannot_be_quantised(packed: Path) -> None:
    matrix = random_matrix(8, 64, 4, 32)
    rewrite(
        packed,
        lambda tensors: [
            tensors.pop("model.norm.weight"),
            tensors.update({f"model.norm.{part}": tensor for part, tensor in packers.gptq(matrix).items()}),
        ],
    )
    with pytest.raises(ModelLoadError, match=r"'model.norm.weight' has shape \[8, 64\], .* asks for \[64\]"):
        load(packed)


def test_parts_in_different_files(packed: Path) -> None:
    expected = greedy(packed)
    tensors = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, packed / file)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert greedy(packed) == expected


def test_w8a8_checkpoint(tmp_path: Path) -> None:
    """The weights load; how activations are rounded is the linear method's business."""
    quantization = compressed("int-quantized", CHANNEL, TOKEN)
    packed, plain = write_pair(tmp_path, tiny_llama(), quantization, *FORMATS["int-quantized"][1:])
    config = load_model_config(str(packed), dtype="float32", max_model_len=None, revision=None, config_only=False)
    assert config.quantization is not None
    assert config.quantization.method == "w8a8"
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(packed).compute_logits(hidden), load(plain).compute_logits(hidden))
