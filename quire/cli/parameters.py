"""How many parameters a model has: counted from its configuration, and from the headers of its files."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.utils.gguf import GGUFFile, find_gguf

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class ParameterCount:
    """total: elements of all weights, tied ones once. looked_up: those of tables of which a token reads one row only
    (input embeddings that are not also the output projection, learned positions); the rest is read in every step.
    """

    total: int
    looked_up: int

    @property
    def read_per_step(self) -> int:
        return self.total - self.looked_up


def count_parameters(config: ModelConfig) -> ParameterCount:
    """From the configuration alone. Raises ModelLoadError for an architecture whose shape is not known here."""
    if config.architecture not in _COUNTERS:
        raise ModelLoadError(f"cannot count the parameters of {config.architecture} from its configuration")
    return _COUNTERS[config.architecture](config, model_fields(config))


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _llama(
    config: ModelConfig, fields: Fields, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool = False, qk_norm: bool = False
) -> ParameterCount:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = _linear(hidden, query, qkv_bias) + 2 * _linear(hidden, key, qkv_bias) + _linear(query, hidden, o_bias)
    inner = fields.integer("intermediate_size")
    mlp = 2 * _linear(hidden, inner, mlp_bias) + _linear(inner, hidden, mlp_bias)
    layer = attention + mlp + 2 * hidden + (2 * head_dim if qk_norm else 0)
    embedding = config.vocab_size * hidden
    tied = fields.boolean("tie_word_embeddings", False)
    return ParameterCount(
        total=config.num_layers * layer + hidden + embedding * (1 if tied else 2),
        looked_up=0 if tied else embedding,
    )


def _plain_llama(config: ModelConfig, fields: Fields) -> ParameterCount:
    bias = fields.boolean("attention_bias", False)
    return _llama(config, fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


def _mistral(config: ModelConfig, fields: Fields) -> ParameterCount:
    return _llama(config, fields, qkv_bias=False, o_bias=False)


def _qwen2(config: ModelConfig, fields: Fields) -> ParameterCount:
    return _llama(config, fields, qkv_bias=True, o_bias=False)


def _qwen3(config: ModelConfig, fields: Fields) -> ParameterCount:
    bias = fields.boolean("attention_bias", False)
    return _llama(config, fields, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gpt2(config: ModelConfig, fields: Fields) -> ParameterCount:
    hidden = config.hidden_size
    inner = fields.integer("n_inner", 4 * hidden)
    layer = (
        _linear(hidden, 3 * hidden, True)
        + _linear(hidden, hidden, True)
        + _linear(hidden, inner, True)
        + _linear(inner, hidden, True)
        + 4 * hidden
    )
    embedding, positions = config.vocab_size * hidden, fields.integer("n_positions") * hidden
    tied = fields.boolean("tie_word_embeddings", True)
    return ParameterCount(
        total=config.num_layers * layer + 2 * hidden + positions + embedding * (1 if tied else 2),
        looked_up=positions + (0 if tied else embedding),
    )


_OPT_POSITION_OFFSET = 2


def _opt(config: ModelConfig, fields: Fields) -> ParameterCount:
    hidden, inner = config.hidden_size, fields.integer("ffn_dim")
    bias = fields.boolean("enable_bias", True)
    norm = 2 * hidden if fields.boolean("layer_norm_elementwise_affine", True) else 0
    layer = 4 * _linear(hidden, hidden, bias) + _linear(hidden, inner, bias) + _linear(inner, hidden, bias) + 2 * norm
    width = fields.integer("word_embed_proj_dim", hidden)
    projections = 0 if width == hidden else 2 * width * hidden
    has_final_norm = fields.boolean("do_layer_norm_before", True) and not fields.boolean(
        "_remove_final_layer_norm", False
    )
    embedding = config.vocab_size * width
    positions = (fields.integer("max_position_embeddings") + _OPT_POSITION_OFFSET) * hidden
    tied = fields.boolean("tie_word_embeddings", True)
    return ParameterCount(
        total=config.num_layers * layer
        + projections
        + positions
        + (norm if has_final_norm else 0)
        + embedding * (1 if tied else 2),
        looked_up=positions + (0 if tied else embedding),
    )


_COUNTERS: Mapping[str, Callable[[ModelConfig, Fields], ParameterCount]] = {
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": _opt,
    "LlamaForCausalLM": _plain_llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


@dataclass(frozen=True)
class Checkpoint:
    """What lies on disk. format: "safetensors" or "GGUF". elements, bytes: stored dtype (the format's name) -> how
    many."""

    format: str
    num_files: int
    elements: Mapping[str, int]
    bytes: Mapping[str, int]


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Sum up the headers of the safetensors files of a directory, else of its GGUF file (which may stand in the
    directory's place); reads no weights. None when there are no such files."""
    files = sorted(path.glob("*.safetensors"))
    gguf = path if path.is_file() else None if files else find_gguf(path)
    if gguf is not None:
        return _gguf_checkpoint(gguf)
    elements: Counter[str] = Counter()
    for file in files:
        for dtype, count in _header(file):
            elements[dtype] += count
    sizes = {dtype: count * DTYPE_BITS[dtype] // 8 for dtype, count in elements.items()}
    return Checkpoint("safetensors", len(files), dict(elements), sizes) if files else None


def _gguf_checkpoint(path: Path) -> Checkpoint:
    elements: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with GGUFFile(path) as file:
        for entry in file.tensors.values():
            elements[entry.type.name] += math.prod(entry.shape)
            sizes[entry.type.name] += entry.num_bytes
    return Checkpoint("GGUF", 1, dict(elements), dict(sizes))


def _header(file: Path) -> list[tuple[str, int]]:
    """(dtype, elements) of each tensor. The file starts with the header's length (8 bytes, little endian)."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            text = stream.read(length)
            if len(text) < length:
                raise ValueError("the header is cut short")
            header = json.loads(text)
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        found = [(str(entry["dtype"]), math.prod(entry["shape"])) for entry in tensors]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is not a valid safetensors file: {error}") from None
    for dtype, _ in found:
        if dtype not in DTYPE_BITS:
            raise ModelLoadError(f"{file} stores tensors of an unknown dtype {dtype!r}")
    return found
