"""GGUF checkpoints: every block type against its definition, number by number, and whole models against the same
weights in a Hugging Face directory."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.models.gguf import weights
from quire.models.gguf.blocks import FORMATS
from quire.models.gguf.weights import GGUFWeights
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.quantization.block_weight import BlockWeight
from quire.quantization.float_weight import Float4Weight
from quire.quantization.integer_weight import IntegerWeight, WeightTensor
from quire.quantization.quantized_weight import QuantizedWeight
from tests.fakes.gguf import BLOCKS, TYPE_NUMBERS, GGUFWriter, StoredTensor, dequantize, quantize, typed
from tests.fakes.gguf_model import MIXED, WIDE, halves_apart, metadata, rope_divisors, save_stored, to_gguf
from tests.long import all_but_long
from tests.models.dense_families import gemma, gemma2, gemma3
from tests.models.families import gpt_oss, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, rope
from tests.models.harness import PagedRunner, chunked_logits, random_prompts, randomize

HALF_PLACES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block has half-precision numbers."""
STORED = {
    "Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32), "Q8_0": (8, 32), "Q4_K": (4, 32),
    "Q5_K": (8, 32), "Q6_K": (8, 16), "Q2_K": (4, 16), "Q3_K": (8, 16), "IQ4_NL": (8, 32),
}  # fmt: skip
"""Bits and group size of the integer weight."""
PROMPTS = random_prompts([5, 1, 23, 12], 97)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1, detokenize=False)


def random_blocks(type_name: str, count: int, seed: int = 0) -> bytes:
    """Any bytes, with finite scales of both signs."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (count, BLOCKS[type_name][1]), dtype=np.uint8)
    for place in HALF_PLACES[type_name]:
        data[:, place : place + 2] = generator.normal(0, 0.1, count).astype("<f2").view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        data[:, 0] %= 253  # exponents, the last of which are no numbers or too large
    return data.tobytes()


def file_of(tensors: dict[str, StoredTensor], path: Path, architecture: str = "qwen2") -> Path:
    keys = {"general.architecture": architecture, f"{architecture}.attention.head_count": 2}
    keys[f"{architecture}.block_count"] = 8
    return GGUFWriter({key: typed(value) for key, value in keys.items()}, tensors).write(path)


def read(path: Path) -> dict[str, WeightTensor]:
    found = {}
    for name, weight in GGUFWeights(path).stream(lambda done, total: None):
        found[name] = weight if isinstance(weight, QuantizedWeight) else weight.clone()
    return found


@pytest.mark.parametrize("type_name", list(BLOCKS))
@pytest.mark.parametrize(("rows", "blocks_per_row", "chunk"), [(1, 1, 2**18), (7, 3, 2**18), (37, 2, 2000)])
def test_blocks_are_what_their_definition_says(
    type_name: str, rows: int, blocks_per_row: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CHUNK_BYTES", chunk)
    shape = (rows, blocks_per_row * BLOCKS[type_name][0])
    data = random_blocks(type_name, rows * blocks_per_row)
    tensor = StoredTensor(TYPE_NUMBERS[type_name], shape, data)
    weight = read(file_of({"output.weight": tensor}, tmp_path / "model.gguf"))["lm_head.weight"]
    if isinstance(weight, BlockWeight):
        assert weight.format == type_name
        assert torch.equal(weight[rows // 2 :].dequantize(), dequantize(type_name, data, shape)[rows // 2 :])
        weight = weight.unpacked()
    if type_name == "MXFP4":
        assert isinstance(weight, Float4Weight)
    else:
        assert isinstance(weight, IntegerWeight)
        assert (weight.bits, weight.group_size) == STORED[type_name]
        stored = FORMATS[type_name]
        assert (weight.offsets is not None, weight.has_half_scales) == (stored.has_offsets, stored.has_half_scales)
    assert torch.equal(weight.dequantize(), dequantize(type_name, data, shape))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_plain_tensors_are_views_of_the_file(type_name: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
    weight = torch.randn(6, 10).to(dtype)
    data = weight.view(torch.uint8).numpy().tobytes()
    path = file_of({"output.weight": StoredTensor(TYPE_NUMBERS[type_name], (6, 10), data)}, tmp_path / "model.gguf")
    stream = GGUFWeights(path).stream(lambda done, total: None)
    name, found = next(stream)
    assert (name, found.dtype) == ("lm_head.weight", dtype)  # type: ignore[union-attr]
    assert torch.equal(found, weight)  # type: ignore[arg-type]
    found[0, 0] = 7  # type: ignore[index]  # the mapping is private
    assert list(stream) == []
    assert torch.equal(read(path)["lm_head.weight"], weight)  # type: ignore[arg-type]


def test_a_view_outlives_the_file(tmp_path: Path) -> None:
    """Pages are dropped after each tensor; a view that is still held reads them again."""
    weight = torch.arange(40000, dtype=torch.float32).reshape(200, 200)
    tensor = StoredTensor(TYPE_NUMBERS["F32"], (200, 200), weight.numpy().tobytes())
    path = file_of({"output.weight": tensor}, tmp_path / "model.gguf")
    ((_, held),) = list(GGUFWeights(path).stream(lambda done, total: None))
    path.unlink()
    assert isinstance(held, torch.Tensor)
    assert torch.equal(held, weight)


def test_progress_counts_bytes(tmp_path: Path) -> None:
    tensor = StoredTensor(TYPE_NUMBERS["F32"], (8,), bytes(32))
    path = file_of({"output_norm.weight": tensor, "rope_freqs.weight": tensor}, tmp_path / "model.gguf")
    seen = []
    names = [name for name, _ in GGUFWeights(path).stream(lambda done, total: seen.append((done, total)))]
    assert (names, seen) == (["model.norm.weight"], [(32, 64), (64, 64)])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("type_name", ["F32", "Q4_K", "Q6_K"])
def test_rows_of_rotated_pairs_are_parted(architecture: str, type_name: str, tmp_path: Path) -> None:
    shape = (16, 256)
    data = np.arange(4096, dtype="<f4").tobytes() if type_name == "F32" else random_blocks(type_name, 16)
    tensor = StoredTensor(TYPE_NUMBERS[type_name], shape, data)
    bias = StoredTensor(TYPE_NUMBERS["F32"], (16,), np.arange(16, dtype="<f4").tobytes())
    tensors = {"blk.3.attn_q.weight": tensor, "blk.3.attn_q.bias": bias, "blk.3.attn_v.weight": tensor}
    stored = read(file_of(tensors, tmp_path / "m.gguf", architecture))
    found = {
        name: weight if isinstance(weight, torch.Tensor) else weight.dequantize() for name, weight in stored.items()
    }
    whole = dequantize(type_name, data, shape)
    moved = halves_apart(whole, 2) if architecture == "llama" else whole
    assert torch.equal(found["model.layers.3.self_attn.q_proj.weight"], moved)
    assert torch.equal(found["model.layers.3.self_attn.v_proj.weight"], whole)
    expected = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15] if architecture == "llama" else list(range(16))
    assert found["model.layers.3.self_attn.q_proj.bias"].tolist() == expected


@pytest.mark.parametrize("type_name", ["BF16", "Q4_K", "MXFP4"])
def test_a_stack_of_experts_is_their_matrices(type_name: str, tmp_path: Path) -> None:
    shape = (3, 2, 256)
    size = {"BF16": 2 * 512}.get(type_name) or 512 // BLOCKS[type_name][0] * BLOCKS[type_name][1]
    plain = torch.randn(shape).bfloat16().view(torch.int16).numpy().tobytes()
    data = (
        plain
        if type_name == "BF16"
        else b"".join(random_blocks(type_name, 512 // BLOCKS[type_name][0], e) for e in range(3))
    )
    tensor = StoredTensor(TYPE_NUMBERS[type_name], shape, data)
    found = read(file_of({"blk.5.ffn_down_exps.weight": tensor}, tmp_path / "model.gguf", "qwen3moe"))
    assert list(found) == [f"model.layers.5.mlp.experts.{expert}.down_proj.weight" for expert in range(3)]
    for expert, weight in enumerate(found.values()):
        whole = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
        own = data[expert * size : (expert + 1) * size]
        assert torch.equal(whole, dequantize(type_name, own, shape[1:]))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.ffn_gate_inp.weight": ((2, 32), "Q8_0")}, "'blk.0.ffn_gate_inp.weight' does not belong"),
        ({"output.weight": ((2, 2, 32), "Q8_0")}, "'output.weight' has 3 dimensions"),
        ({"blk.0.attn_q.weight": ((6, 32), "Q8_0")}, "6 rows, which 2 heads cannot share"),
    ],
)
def test_tensors_that_no_model_has(
    tensors: dict[str, tuple[tuple[int, ...], str]], message: str, tmp_path: Path
) -> None:
    stored = {
        name: StoredTensor(TYPE_NUMBERS[kind], shape, random_blocks(kind, int(np.prod(shape)) // 32))
        for name, (shape, kind) in tensors.items()
    }
    with pytest.raises(ModelLoadError, match=message):
        read(file_of(stored, tmp_path / "model.gguf", "llama"))


@pytest.mark.parametrize(
    ("type_name", "block"),
    [
        ("Q8_0", struct.pack("<e", float("inf")) + bytes(32)),
        ("Q4_0", struct.pack("<e", float("-inf")) + bytes(16)),
        ("Q4_1", struct.pack("<ee", 1.0, float("nan")) + bytes(16)),
        ("MXFP4", b"\xff" + bytes(16)),
    ],
)
def test_a_scale_that_is_not_finite(type_name: str, block: bytes, tmp_path: Path) -> None:
    data = bytes(len(block)) + block
    path = file_of({"output.weight": StoredTensor(TYPE_NUMBERS[type_name], (2, 32), data)}, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"tensor .output\.weight.: (scales|offsets) hold"):
        read(path)


# Whole models.

MODELS: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "llama": ("llama", lambda: llama(**WIDE)),
    "llama-tied": ("llama", lambda: llama(**WIDE, tie_word_embeddings=True)),
    "qwen3": ("qwen3", lambda: qwen3(**WIDE, head_dim=32)),
}


@pytest.mark.parametrize("name", all_but_long(MODELS, ["qwen3"]))
def test_greedy_tokens_are_those_of_the_dequantised_directory(name: str, tmp_path: Path) -> None:
    architecture, make = MODELS[name]
    model = randomize(make())
    writer, stored = to_gguf(model, architecture, MIXED)
    path = writer.write(tmp_path / "model.gguf")
    directory = save_stored(model, stored, tmp_path / "directory")
    expected = generate(directory)
    assert len({token for tokens, _ in expected for token in tokens}) > 3  # not stuck
    assert generate(path) == expected
    (tmp_path / "only").mkdir()
    shutil.move(path, tmp_path / "only" / "any-name.gguf")
    assert generate(tmp_path / "only") == expected
    shutil.copy(directory / "config.json", tmp_path / "only")
    assert generate(tmp_path / "only", load_format="gguf") == expected
    (tmp_path / "split").mkdir()
    first, *_ = writer.write_split(tmp_path / "split", 3)
    assert generate(first) == expected
    assert generate(tmp_path / "split") == expected


def generate(model: Path, **options: object) -> list[tuple[list[int], float]]:
    """Tokens, and their summed log-probability: equal only for weights that are equal bit by bit."""
    options = {"num_threads": 1, "skip_tokenizer_init": True, "attention_backend": "torch", **options}
    with LLM(str(model), num_blocks_override=64, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


PLAIN_MODELS: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "llama-biases": ("llama", lambda: llama(attention_bias=True, mlp_bias=True, head_dim=12)),
    "mistral-window": ("llama", lambda: mistral(sliding_window=20)),
    "qwen2": ("qwen2", qwen2),
    "qwen3-biases": ("qwen3", lambda: qwen3(attention_bias=True)),
    "gemma2": ("gemma2", lambda: gemma2(query_pre_attn_scalar=40)),
    "gemma3": ("gemma3", lambda: gemma3(query_pre_attn_scalar=24, rope_parameters=GEMMA_ROPE)),
    "gemma": ("gemma", gemma),
    "qwen2moe": ("qwen2moe", qwen2_moe),
    "qwen3moe": ("qwen3moe", lambda: qwen3_moe(norm_topk_prob=True)),
    "mixtral": ("llama", lambda: mixtral(5, 2)),
    "mixtral-window": ("llama", lambda: mixtral(3, 2, sliding_window=20)),
    "gpt-oss": ("gpt-oss", gpt_oss),
    "linear": ("llama", lambda: rope("linear", factor=4.0)),
    "yarn": ("qwen2", lambda: qwen2(rope_parameters=YARN)),
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("type_name", ["F32", "Q4_0"])
def test_gate_above_up_in_one_tensor(type_name: str, tmp_path: Path) -> None:
    """The same weights as from two tensors."""
    model = randomize(qwen3_moe(norm_topk_prob=True, hidden_size=64, moe_intermediate_size=32))
    apart, _ = to_gguf(model, "qwen3moe", {"experts": type_name})
    joined, _ = to_gguf(model, "qwen3moe", {"experts": type_name})
    for writer in (apart, joined):
        add_extras(writer, "qwen3moe", model)
    for name in [name for name in joined.tensors if "ffn_gate_exps" in name]:
        gate = joined.tensors.pop(name)
        up = joined.tensors.pop(name.replace("gate", "up"))
        count, width, hidden = gate.shape
        parts = (np.frombuffer(each.data, dtype=np.uint8).reshape(count, -1) for each in (gate, up))
        data = np.concatenate(list(parts), axis=1).tobytes()
        joined.tensors[name.replace("gate", "gate_up")] = StoredTensor(gate.type, (count, 2 * width, hidden), data)
    files = [writer.write(tmp_path / f"{name}.gguf") for name, writer in (("apart", apart), ("joined", joined))]
    found = []
    for path in files:
        config = load_model_config(str(path), dtype="float32", max_model_len=None, revision=None, config_only=False)
        found.append(chunked_logits(PagedRunner(load_model(config, LoadConfig("auto", 0), SINGLE_RANK)), PROMPTS, 7))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", list(PLAIN_MODELS))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, make = PLAIN_MODELS[name]
    model = randomize(make())
    writer, _ = to_gguf(model, architecture)
    add_extras(writer, architecture, model)
    assert_logits(writer.write(tmp_path / "model.gguf"), model)


def test_experts_in_four_bit_floats_stay_what_they_are(tmp_path: Path) -> None:
    """GPT-OSS as its files have it: MXFP4 experts, packed for the native kernels without a wider copy."""
    model = randomize(gpt_oss(hidden_size=64, intermediate_size=32))
    for name, weight in model.named_parameters():
        if "experts." in name and not name.endswith("_bias"):
            rows = weight.data.transpose(1, 2)
            near = dequantize("MXFP4", quantize("MXFP4", rows.contiguous()), rows.shape)
            weight.data.copy_(near.transpose(1, 2))
    writer, _ = to_gguf(model, "gpt-oss", {"experts": "MXFP4"})
    add_extras(writer, "gpt-oss", model)
    path = writer.write(tmp_path / "model.gguf")
    assert_logits(path, model)
    found = read(path)["model.layers.1.mlp.experts.4.down_proj.weight"]
    assert isinstance(found, BlockWeight)
    assert isinstance(found.unpacked(), Float4Weight)


def test_llama3_frequencies_come_as_divisors(tmp_path: Path) -> None:
    settings = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = randomize(rope("llama3", **settings))
    writer, _ = to_gguf(model, "llama")
    writer.tensors["rope_freqs.weight"] = rope_divisors(8, 500.0, 8.0, 1.0, 4.0, 64)
    assert_logits(writer.write(tmp_path / "model.gguf"), model)


def add_extras(writer: GGUFWriter, architecture: str, model: PreTrainedModel) -> None:
    """What goes beyond the sizes."""
    keys: dict[str, object] = {}
    if getattr(model.config, "sliding_window", None) and architecture in ("llama", "gemma2", "gemma3", "gpt-oss"):
        keys["attention.sliding_window"] = model.config.sliding_window
    if architecture == "gemma2":
        keys |= {name: getattr(model.config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if architecture == "gemma3":
        keys["attention.sliding_window_pattern"] = 3
    config = model.config
    if hasattr(config, "num_experts_per_tok"):
        count = getattr(config, "num_local_experts", None) or config.num_experts
        keys |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if architecture.endswith("moe"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    settings = model.config.rope_parameters.get("full_attention", model.config.rope_parameters)
    if settings["rope_type"] != "default":
        keys |= {"rope.scaling.type": settings["rope_type"], "rope.scaling.factor": settings["factor"]}
    if settings["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
    writer.metadata |= {f"{architecture}.{key}": typed(value) for key, value in keys.items()}


def assert_logits(path: Path, model: PreTrainedModel) -> None:
    config = load_model_config(str(path), dtype="float32", max_model_len=None, revision=None, config_only=False)
    prompts = random_prompts([70, 3, 41], 97)
    found = chunked_logits(PagedRunner(load_model(config, LoadConfig("auto", 0), SINGLE_RANK)), prompts, 16)
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


def test_the_test_of_logits_sees_unparted_rows(tmp_path: Path) -> None:
    """Queries and keys of a LLaMA file that are not put back give other logits."""
    model = randomize(llama())
    writer, _ = to_gguf(model, "qwen3")
    writer.metadata = metadata(model, "llama")
    with pytest.raises(AssertionError):
        assert_logits(writer.write(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize(
    ("load_format", "message"),
    [("safetensors", "is a GGUF file, which load_format='safetensors' does not read"), ("pt", "load_format='pt'")],
)
def test_another_format_is_asked_for(load_format: str, message: str, tmp_path: Path) -> None:
    writer, _ = to_gguf(llama(), "llama")
    path = writer.write(tmp_path / "model.gguf")
    config = load_model_config(str(path), dtype="auto", max_model_len=None, revision=None, config_only=False)
    with pytest.raises(ModelLoadError, match=message):
        load_model(config, LoadConfig(load_format, 0), SINGLE_RANK)


def test_dummy_weights_need_no_data(tmp_path: Path) -> None:
    writer, _ = to_gguf(llama(), "llama")
    path = writer.write(tmp_path / "model.gguf")
    config = load_model_config(str(path), dtype="auto", max_model_len=None, revision=None, config_only=True)
    assert load_model(config, LoadConfig("dummy", 0), SINGLE_RANK).weight_bytes() > 0
