"""From a GGUF file's metadata to the configuration of its model, and one clear error for whatever does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.families import GGUF
from quire.config.gguf import read_gguf
from quire.config.gguf_tensors import hf_name
from quire.config.hf_config import load_model_config, model_fields
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.rope import LLAMA_DEFAULTS, read_rope
from quire.errors import ModelLoadError
from tests.fakes.gguf import FLOAT32, GGUFWriter, StoredTensor, Typed, typed

Change = Callable[[GGUFWriter], object]
SIZES = {
    "context_length": 256,
    "embedding_length": 48,
    "block_count": 2,
    "feed_forward_length": 100,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.5,
    "rope.freq_base": 5000.0,
}
LAYER = {
    "attn_norm.weight": (48,),
    "ffn_norm.weight": (48,),
    "attn_q.weight": (48, 48),
    "attn_k.weight": (16, 48),
    "attn_v.weight": (16, 48),
    "attn_output.weight": (48, 48),
    "ffn_gate.weight": (100, 48),
    "ffn_up.weight": (100, 48),
    "ffn_down.weight": (48, 100),
}


def model(architecture: str = "llama") -> GGUFWriter:
    keys = {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 5}
    keys |= {f"{architecture}.{key}": value for key, value in SIZES.items()}
    writer = GGUFWriter({key: typed(value) for key, value in keys.items()})
    for name, shape in {"token_embd.weight": (97, 48), "output_norm.weight": (48,), "output.weight": (97, 48)}.items():
        writer.tensors[name] = zeros(shape)
    for layer in range(2):
        for name, shape in LAYER.items():
            writer.tensors[f"blk.{layer}.{name}"] = zeros(shape)
    if architecture == "qwen2":
        add_biases(writer, "attn_q", "attn_k", "attn_v")
    if architecture == "qwen3":
        for layer in range(2):
            writer.tensors[f"blk.{layer}.attn_q_norm.weight"] = zeros((8,))
            writer.tensors[f"blk.{layer}.attn_k_norm.weight"] = zeros((8,))
    return writer


def zeros(shape: tuple[int, ...]) -> StoredTensor:
    size = 1
    for extent in shape:
        size *= extent
    return StoredTensor(0, shape, bytes(4 * size))


def add_biases(writer: GGUFWriter, *names: str) -> None:
    for layer in range(2):
        for name in names:
            writer.tensors[f"blk.{layer}.{name}.bias"] = zeros(LAYER[f"{name}.weight"][:1])


def read(path: Path, **options: Any) -> ModelConfig:
    return load_model_config(
        str(path), **{"dtype": "auto", "max_model_len": None, "revision": None, "config_only": False, **options}
    )


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_sizes(architecture: str, name: str, tmp_path: Path) -> None:
    path = model(architecture).write(tmp_path / "model.gguf")
    config = read(path)
    assert (config.name, config.path, config.architecture) == (str(path), path, name)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (97, 48, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert (config.max_model_len, config.sliding_windows, config.eos_token_ids) == (256, (None, None), (5,))
    fields = model_fields(config)
    assert (fields.integer("intermediate_size"), fields.number("rms_norm_eps")) == (100, 0.5)
    assert fields.boolean("tie_word_embeddings", True) is False
    assert fields.values.get("attention_bias", False) is False
    rope = read_rope(fields, 8, LLAMA_DEFAULTS)
    assert (rope.rope_type, rope.theta, rope.rotary_dim) == ("default", 5000.0, 8)
    assert fields.where == str(path)


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float32"),
        ({"kv_cache_dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "int8"}, "int8"),
        ({"attention_backend": "torch"}, "float32"),
    ],
)
def test_keys_and_values_of_a_file_have_16_bits_unless_told_otherwise(
    options: dict[str, str], cache: str, tmp_path: Path
) -> None:
    path = str(model().write(tmp_path / "model.gguf"))
    found = resolve(EngineOptions(model=path, device="cpu", **{"attention_backend": "native", **options})).model
    assert found.kv_cache_dtype == cache
    assert ("(the default for GGUF files)" in found.cache_format) == (not options)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, 8),
        ({"activation_bits": "16"}, 16),
        ({"dtype": "float32"}, 0),
        ({"matmul_precision": "bfloat16"}, 0),
        ({"quantization": "int8"}, 0),
        ({"quantization": "int8", "activation_bits": "8"}, 8),
        ({"attention_backend": "torch"}, 0),
    ],
)
def test_activations_have_eight_bits_unless_more_is_asked_for(
    options: dict[str, str], bits: int, tmp_path: Path
) -> None:
    path = str(model().write(tmp_path / "model.gguf"))
    found = resolve(EngineOptions(model=path, device="cpu", **{"attention_backend": "native", **options})).model
    assert found.activation_bits == bits


def test_products_are_in_what_the_cpu_multiplies_faster(tmp_path: Path) -> None:
    """The file does not say what its weights were before they were quantised."""
    path = model().write(tmp_path / "model.gguf")
    for asked in ("auto", "bfloat16", "float32"):
        config = resolve(EngineOptions(model=str(path), attention_backend="native", matmul_precision=asked))
        assert config.device.matmul_precision == asked


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({2: "<|im_end|>", 3: "<|endoftext|>", 4: "<|im_start|>"}, (2, 3, 5)),
        ({6: "<|eot_id|>", 7: "<|eom_id|>", 8: "<|end_of_text|>"}, (5, 6, 7, 8)),
        ({6: "<end_of_turn>", 7: "<eos>"}, (5, 6, 7)),
        ({6: "<|end|>", 7: "<|assistant|>"}, (5, 6)),
        ({6: "<|end|>", 7: "<|return|>", 8: "<|call|>"}, (5, 7, 8)),
        ({6: "</s>", 7: "<|tool_response>"}, (5, 7)),
        ({6: "_<EOT>", 7: "<|file_sep|>", 8: "<|repo_name|>"}, (5, 6, 7, 8)),
    ],
)
def test_tokens_that_end_a_text_by_their_names(tmp_path: Path, tokens: dict[int, str], ends: tuple[int, ...]) -> None:
    """As llama.cpp knows them: files of models with several such tokens name one."""
    writer = model()
    names = [tokens.get(number, f"t{number}") for number in range(16)]
    writer.metadata["tokenizer.ggml.tokens"] = typed(names)
    assert read(writer.write(tmp_path / "model.gguf")).eos_token_ids == ends


def test_tied_embeddings_biases_window_and_ends(tmp_path: Path) -> None:
    writer = model()
    del writer.tensors["output.weight"]
    writer.metadata["tokenizer.ggml.eot_token_id"] = typed(7)
    writer.metadata["tokenizer.ggml.eom_token_id"] = typed(5)
    add_biases(writer, "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    config = read(writer.write(tmp_path / "model.gguf"))
    fields = model_fields(config)
    assert [fields.boolean(key, False) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")] == [True] * 3
    assert config.eos_token_ids == (5, 7)
    writer = model()
    writer.metadata["llama.attention.sliding_window"] = typed(32)
    config = read(writer.write(tmp_path / "model.gguf"))
    assert (config.architecture, config.sliding_windows) == ("MistralForCausalLM", (32, 32))


def test_rope_scalings(tmp_path: Path) -> None:
    def rope_of(keys: dict[str, object]) -> Any:
        writer = model()
        writer.metadata |= {f"llama.rope.{key}": typed(value) for key, value in keys.items()}
        return read_rope(model_fields(read(writer.write(tmp_path / "model.gguf"))), 8, LLAMA_DEFAULTS)

    linear = rope_of({"scaling.type": "linear", "scaling.factor": 4.0})
    assert (linear.rope_type, linear.factor, linear.longest) == ("linear", 4.0, 1024)
    keys = {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.original_context_length": 128}
    yarn = rope_of({**keys, "scaling.yarn_beta_fast": 16.0, "scaling.finetuned": True})
    assert (yarn.rope_type, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 2.0, 128)
    assert (yarn.beta_fast, yarn.beta_slow) == (16.0, 1.0)
    assert rope_of({"scaling.type": "none"}).rope_type == "default"


def test_a_directory_with_one_file_needs_no_config_json(tmp_path: Path) -> None:
    path = model().write(tmp_path / "any.gguf")
    assert read(tmp_path).path == path
    other = {**read_gguf(path).config, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(other))
    config = read(tmp_path)
    assert (config.path, config.max_model_len) == (tmp_path, 128)


def test_directories_that_are_not_clear(tmp_path: Path) -> None:
    model().write(tmp_path / "a.gguf")
    model().write(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match="holds 2 GGUF files"):
        read(tmp_path)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
        read(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelLoadError, match=r"is a file: give the model's directory, or a file \*.gguf"):
        read(tmp_path / "weights.bin")


def key(name: str, value: object) -> Change:
    return lambda writer: writer.metadata.update({name: typed(value)})


def without(name: str) -> Change:
    return lambda writer: writer.metadata.pop(name)


def tensor(name: str, shape: tuple[int, ...]) -> Change:
    return lambda writer: writer.tensors.update({name: zeros(shape)})


def no_tensor(name: str) -> Change:
    return lambda writer: writer.tensors.pop(name)


def both(*changes: Change) -> Change:
    return lambda writer: [change(writer) for change in changes]


FACTORS = tensor("rope_freqs.weight", (4,))
WRONG: dict[str, tuple[Change, str]] = {
    "architecture": (key("general.architecture", "rwkv6"), r"general.architecture 'rwkv6' is not supported \(known"),
    "no architecture": (without("general.architecture"), "the key 'general.architecture' is missing"),
    "architecture not text": (key("general.architecture", 3), "general.architecture must be a string"),
    "split": (key("split.count", 2), r"it is the first of 2 files, and its name does not end in -00001-of-00002"),
    "no size": (without("llama.block_count"), r"\(llama\): the key 'block_count' is missing"),
    "negative": (lambda w: w.metadata.update({"llama.block_count": Typed(5, -1)}), "must be an integer of at least 1"),
    "size by layer": (
        key("llama.feed_forward_length", [100, 100]),
        "must be an integer of at least 1, not a list of 2",
    ),
    "size not whole": (key("llama.embedding_length", 48.0), "embedding_length must be an integer"),
    "layers": (key("llama.block_count", 4000), "block_count is 4000, and there are 21 tensors"),
    "far too many layers": (key("llama.block_count", 2**32 - 1), "block_count must be at most 4096, not 4294967295"),
    "one layer more": (key("llama.block_count", 3), "'blk.2.attn_norm.weight' is missing"),
    "one layer less": (key("llama.block_count", 1), "'blk.1.attn_norm.weight' does not belong"),
    "hidden size": (key("llama.embedding_length", 96), r"'token_embd.weight' has shape \[97, 48\], the metadata asks"),
    "inner size": (key("llama.feed_forward_length", 2**30), r"ffn_gate.weight' has shape \[100, 48\]"),
    "heads": (key("llama.attention.head_count", 3), "attn_k.weight' has shape"),
    "no head": (key("llama.attention.head_count", 48), "heads cannot have 1 elements"),
    "key heads": (key("llama.attention.head_count_kv", 6), "attn_k.weight' has shape"),
    "value size": (key("llama.attention.value_length", 4), "value heads of another size"),
    "part of a head": (key("llama.rope.dimension_count", 4), "rotating a part of each head"),
    "context": (key("llama.context_length", 2**31), "context_length must be at most 16777216, not 2147483648"),
    "epsilon": (key("llama.attention.layer_norm_rms_epsilon", -1.0), "must be a number greater than zero"),
    "theta": (key("llama.rope.freq_base", float("nan")), "rope.freq_base must be a number greater than zero"),
    "experts": (key("llama.expert_count", 8), "the key 'expert_used_count' is missing"),
    "attention scale": (key("llama.attention.scale", 0.5), "attention.scale 0.5 is not supported"),
    "scaling": (key("llama.rope.scaling.type", "longrope"), "rope.scaling.type 'longrope' is not supported"),
    "no factor": (key("llama.rope.scaling.type", "linear"), "the key 'rope.scaling.factor' is missing"),
    "factors of another type": (
        lambda w: w.tensors.update({"rope_freqs.weight": StoredTensor(1, (4,), bytes(8))}),
        "rope_freqs.weight must be 4 numbers of type F32",
    ),
    "factors of another size": (tensor("rope_freqs.weight", (8,)), "rope_freqs.weight must be 4 numbers"),
    "factors of zero": (FACTORS, "short_factor must be a number greater than zero"),
    "factors and scaling": (
        both(FACTORS, key("llama.rope.scaling.type", "linear"), key("llama.rope.scaling.factor", 2.0)),
        "'linear' together with the tensor 'rope_freqs.weight'",
    ),
    "end of text": (key("tokenizer.ggml.eos_token_id", "</s>"), "eos_token_id must be an integer"),
    "no embedding": (no_tensor("token_embd.weight"), "'token_embd.weight' is missing"),
    "no norm": (no_tensor("output_norm.weight"), "'output_norm.weight' is missing"),
    "surplus": (tensor("blk.0.ffn_gate_exps.weight", (4,)), "'blk.0.ffn_gate_exps.weight' does not belong"),
    "surplus layer": (tensor("blk.7.attn_q.weight", (48, 48)), "'blk.7.attn_q.weight' does not belong"),
    "some biases": (lambda w: add_biases(w, "attn_q"), "'blk.0.attn_k.bias' is missing"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_cannot_be_a_model(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    writer = model()
    change(writer)
    path = writer.write(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=message) as raised:
        read_rope(model_fields(read(path)), 8)
    assert str(path) in raised.value.message


def test_a_window_for_qwen_is_refused(tmp_path: Path) -> None:
    writer = model("qwen2")
    writer.metadata["qwen2.attention.sliding_window"] = typed(32)
    with pytest.raises(ModelLoadError, match="sliding_window is not supported for this architecture"):
        read(writer.write(tmp_path / "model.gguf"))


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    writer = model()
    values = {"expert_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0, "logit_scale": 1.0}
    writer.metadata |= {f"llama.{name}": typed(value) for name, value in values.items()}
    writer.metadata["llama.unheard_of"] = Typed(FLOAT32, 3.0)
    assert read(writer.write(tmp_path / "model.gguf")).num_layers == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.31.ffn_down.bias", "model.layers.31.mlp.down_proj.bias"),
        ("blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.01.attn_q.weight", None),
        ("blk.-1.attn_q.weight", None),
        ("blk.0.attn_q", None),
        ("blk.0.ssm_a.weight", None),
        ("rope_freqs.weight", None),
        ("", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    names = GGUF["llama", False, 0].gguf
    assert names is not None
    assert hf_name(name, names) == expected
