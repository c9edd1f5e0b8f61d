"""Whole models with 8-bit and 4-bit floats: a tiny LLaMA saved in each format says what Transformers says with the
weights that the format means."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelLoadError
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.quantization.quantize import quantize_rows
from quire.quantization.quantize_floats import quantize_float8, quantize_mxfp4
from tests.fakes.ranks import run_ranks
from tests.long import one_in
from tests.models.families import gpt_oss
from tests.models.harness import randomize, save
from tests.models.test_quantized_checkpoints import PROMPTS, change_config, is_linear, tiny_llama
from tests.models.test_ranks import load_share, logits_of
from tests.quantization.float_packers import Pack, fp8, mxfp4, nvfp4

Format = tuple[dict[str, Any], Pack]
BLOCK = (32, 16)
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FORMATS: dict[str, Format] = {
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor", activations="input_scale")),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
        fp8("block", block=BLOCK, name="weight_scale_inv"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("row")),
    "float-quantized": (compressed("float-quantized", {**FLOAT, "strategy": "channel"}), fp8("row")),
    "nvfp4-pack-quantized": (
        compressed("nvfp4-pack-quantized", {**FLOAT, "num_bits": 4, "group_size": 16}),
        nvfp4("compressed-tensors"),
    ),
    "mxfp4-pack-quantized": (compressed("mxfp4-pack-quantized", {**FLOAT, "num_bits": 4, "group_size": 32}), mxfp4),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        fp8("tensor", activations="input_scale"),
    ),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4("modelopt")),
}


def write_pair(directory: Path, format: Format) -> tuple[Path, Path]:
    """The model with random quantised matrices, packed, and the same with what they mean in float32."""
    quantization, pack = format
    plain = save(tiny_llama(), directory / "plain")
    packed = Path(shutil.copytree(plain, directory / "packed"))
    weights = load_file(plain / "model.safetensors")
    tensors, dense = {}, {}
    for seed, (name, weight) in enumerate(sorted(weights.items())):
        if not is_linear(name):
            tensors[name] = dense[name] = weight
            continue
        parts, meaning = pack(*weight.shape, seed)
        dense[name] = meaning.float()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, packed / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    change_config(packed, quantization)
    return packed, plain


def greedy(directory: Path, **options: Any) -> list[list[int]]:
    with LLM(model=directory, skip_tokenizer_init=True, dtype="float32", num_blocks_override=64, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_of_transformers(directory: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, min_new_tokens=8
        )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_transformers_with_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path, FORMATS[name])
    expected = greedy_of_transformers(plain)
    assert len({token for row in expected for token in row}) > 5
    assert greedy(packed) == expected
    if name in ("fp8-block", "modelopt-nvfp4"):
        assert greedy(packed, attention_backend="torch") == expected


def write_large_heads(directory: Path, names: str) -> Path:
    """A model of which keys and values are thousands, with their scales in the tensors `layer.names`, of which {} is k
    or v; without a {} one for both."""
    model = tiny_llama()
    for layer in model.model.layers:
        attention = layer.self_attn
        for first, second, factor in (("k_proj", "q_proj", 2.0**14), ("v_proj", "o_proj", 2.0**12)):
            getattr(attention, first).weight.data *= factor
            getattr(attention, second).weight.data /= factor
    saved = save(model, directory)
    with torch.inference_mode():
        kept = model(torch.tensor([max(PROMPTS, key=len)])).past_key_values.layers
    tensors = load_file(saved / "model.safetensors")
    for index, layer in enumerate(kept):
        amax = {"k": float(layer.keys.abs().max()), "v": float(layer.values.abs().max())}
        assert min(amax.values()) > 1000
        for part in "kv":
            scale = (max(amax.values()) if "{}" not in names else amax[part]) / 300
            tensors[f"model.layers.{index}.{names.format(part, part)}"] = torch.tensor([scale])
    save_file(tensors, saved / "model.safetensors")
    return saved


def prompt_logprobs(directory: Path, **options: Any) -> torch.Tensor:
    with LLM(model=directory, skip_tokenizer_init=True, dtype="float32", num_blocks_override=64, **options) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": max(PROMPTS, key=len)},
            SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True),
        )
        found = output.prompt_logprobs[1:]
        ids = output.prompt_token_ids[1:]
    return torch.tensor([each[token].logprob for each, token in zip(found, ids, strict=True)])


@pytest.mark.parametrize(
    ("names", "options"),
    one_in(
        2,
        [
            ("self_attn.{}_scale", {"attention_backend": "native"}),
            ("self_attn.attn.{}_scale", {"attention_backend": "native", "model_impl": "transformers"}),
            ("self_attn.{}_proj.{}_scale", {"attention_backend": "torch"}),
            ("self_attn.{}_proj.output_scale", {"attention_backend": "triton"}),
            ("self_attn.kv_scale", {"attention_backend": "torch"}),
        ],
    ),
)
def test_scales_of_an_fp8_cache(
    names: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys and values of thousands, which are cut off at 448 without scales, are rounded as small ones are."""
    saved = write_large_heads(tmp_path, names)
    with caplog.at_level(logging.INFO):
        expected = prompt_logprobs(saved, **options)
    count = 4 if "{}" in names else 2
    assert caplog.text.count(f"{count} scales of an 8-bit KV cache are left out: keys and values are kept in") == 1
    scaled = prompt_logprobs(saved, **options, kv_cache_dtype="fp8")
    tensors = load_file(saved / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "scale" not in k}, saved / "model.safetensors")
    cut = prompt_logprobs(saved, **options, kv_cache_dtype="fp8")
    errors = [float((found - expected).abs().mean()) for found in (scaled, cut)]
    assert 0 < errors[0] < 0.2 * errors[1]


def write_gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """As write_pair: the experts of a layer in one tensor, biases and the other matrices as they are."""
    model = randomize(gpt_oss(hidden_size=64, intermediate_size=64, swiglu_limit=0.8))
    plain = save(model, tmp_path / "plain")
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    weights = load_file(plain / "model.safetensors")
    tensors = dict(weights)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = [quantize_mxfp4(expert.t(), name=name) for expert in tensors.pop(name)]
        blocks = torch.stack([expert.pairs for expert in experts]).unflatten(2, (-1, 16))
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.stack([expert.scale_codes for expert in experts])
        weights[name] = torch.stack([expert.dequantize().t() for expert in experts]).contiguous()
    save_file(tensors, packed / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    change_config(packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return packed, plain


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    packed, plain = write_gpt_oss(tmp_path)
    assert greedy(packed) == greedy(plain)


@pytest.fixture
def blocks(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, FORMATS["fp8-block"])


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path, FORMATS["modelopt-nvfp4"])
    change_config(packed, None)
    with pytest.raises(ModelLoadError, match=r"does not belong to this model|not floating-point numbers"):
        greedy(packed)
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (packed / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert greedy(packed) == greedy(plain)


def test_8_bit_floats_without_a_quantization_config(blocks: tuple[Path, Path]) -> None:
    change_config(blocks[0], None)
    with pytest.raises(ModelLoadError, match=r"_proj\.weight(_scale_inv)?' (holds .*e4m3fn|does not belong)"):
        greedy(blocks[0])


def test_the_option_names_what_the_checkpoint_brings(blocks: tuple[Path, Path]) -> None:
    assert greedy(blocks[0], quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization='w8a8' is not what the checkpoint brings: fp8"):
        greedy(blocks[0], quantization="w8a8")


def test_ranks_share_blocks_out_and_refuse_to_cut_them(blocks: tuple[Path, Path]) -> None:
    """Of 96 inner features each of two ranks has 48, three blocks of 16; each of four has one block and a half."""

    def logits(group: ProcessGroup) -> torch.Tensor:
        return logits_of(load_share(blocks[0], group))

    expected = logits(SINGLE_RANK)
    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)
    with pytest.raises(ModelLoadError, match=r"input features 0 to 24 do not start and end with a group of 16"):
        run_ranks(4, logits)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_rounding_while_loading(method: str, tmp_path: Path) -> None:
    """The tokens of the model with rounded weights; the vocabulary's are 8-bit integers."""
    plain = save(tiny_llama(), tmp_path / "plain")
    found = greedy(plain, quantization=method)
    weights = load_file(plain / "model.safetensors")
    rounded = {}
    for name, weight in weights.items():
        if is_linear(name):
            quantized = (quantize_float8 if method == "fp8" else quantize_mxfp4)(weight, name=name)
            rounded[name] = quantized.dequantize()
        else:
            is_vector = weight.dim() == 1
            rounded[name] = weight if is_vector else quantize_rows(weight, 8, None, name=name).dequantize()
    save_file(rounded, plain / "model.safetensors")
    assert found == greedy(plain)
