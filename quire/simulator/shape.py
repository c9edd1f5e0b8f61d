"""The shape of a model: what its Hugging Face config.json says about sizes, for any family.

`models.json` holds the configurations of some models by name, sizes only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.hf_json import Fields, read_json
from quire.config.model import ModelConfig
from quire.errors import UserError, nearest_name
from quire.kv_cache.spec import FullAttentionSpec, LayerSpec, SlidingWindowSpec
from quire.simulator.hardware import DTYPE_BYTES
from quire.simulator.layout import Layout

BUILT_IN = Path(__file__).with_name("models.json")
UNGATED = frozenset({"opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "phi", "mpt", "starcoder2", "nemotron"})
"""Model types whose MLP has two matrices; all others have three (a gate besides)."""
BIASED = frozenset({"opt", "gpt2", "gpt_neox", "bloom", "phi", "starcoder2"})
"""Model types with a bias in every linear layer, and norms with a bias."""
QK_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
TIED = frozenset({"opt", "gpt2", "gemma", "gemma2", "gemma3", "gemma3_text"})
"""Model types that tie input and output embeddings unless they say otherwise."""
OPT_POSITION_OFFSET = 2


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP. num_active: of them for each token. intermediate: width of one.
    shared_intermediate: width of the experts that every token passes besides, together; 0: there are none."""

    num_experts: int
    num_active: int
    intermediate: int
    shared_intermediate: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are kept as one vector of `kv_rank` elements a token, and `rope_dim`
    rotated ones that all heads share. q_rank: of the queries' own compression; None: they have none. nope_dim,
    value_dim: elements of a head's key without the rotated ones, and of its value."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None

    @property
    def token_elements(self) -> int:
        """Kept of one token in one layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class ModelShape:
    """Sizes, in elements. windows: per layer the attention window in tokens, None for full attention. num_moe_layers:
    of the layers, those that have `experts` in the place of an MLP of `intermediate`. dtype: what the weights are
    stored in. small_parameters: norms, biases and learned positions; looked_up: elements of tables of which a token
    reads one row only (input embeddings that are not tied, positions)."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    windows: tuple[int | None, ...]
    dtype: str
    is_gated: bool = True
    is_tied: bool = False
    embedding_width: int = 0
    """Of a row of the vocabulary's table, projected to `hidden` if that is another number; 0: it is `hidden`."""
    experts: Experts | None = None
    num_moe_layers: int = 0
    latent: LatentAttention | None = None
    small_parameters: int = 0
    positions: int = 0
    """Rows of a table of learned positions."""

    @classmethod
    def from_config(cls, config: ModelConfig | Mapping[str, Any], name: str = "model") -> ModelShape:
        """From the product's configuration of a model, or the contents of any config.json.

        Raises ModelLoadError that names the key which is missing or wrong.
        """
        if isinstance(config, ModelConfig):
            return _read(Fields(config.hf, str(config.path)), config.name)
        return _read(Fields(config, name), name)

    # -- parameters ------------------------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's projections, biases left out."""
        return sum(inputs * outputs for _, inputs, outputs in self.attention_projections())

    def attention_projections(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of one layer's matrices."""
        hidden, latent = self.hidden, self.latent
        if latent is None:
            query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return [("qkv", hidden, query + 2 * key), ("output", query, hidden)]
        query = self.num_heads * (latent.nope_dim + latent.rope_dim)
        queries = [("q", hidden, query)]
        if latent.q_rank is not None:
            queries = [("q_down", hidden, latent.q_rank), ("q_up", latent.q_rank, query)]
        return [
            *queries,
            ("kv_down", hidden, latent.token_elements),
            ("kv_up", latent.kv_rank, self.num_heads * (latent.nope_dim + latent.value_dim)),
            ("output", self.num_heads * latent.value_dim, hidden),
        ]

    def mlp_parameters(self, width: int) -> int:
        """Elements of an MLP (or an expert) of a width."""
        return (3 if self.is_gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Elements of one expert."""
        return 0 if self.experts is None else self.mlp_parameters(self.experts.intermediate)

    @property
    def dense_parameters(self) -> int:
        """Elements of all matrices that every token passes in every step, the output projection not among them."""
        attention = self.num_layers * self.attention_parameters
        mlps = (self.num_layers - self.num_moe_layers) * self.mlp_parameters(self.intermediate)
        shared = 0
        if self.experts is not None:
            shared = self.mlp_parameters(self.experts.shared_intermediate) + self.hidden * self.experts.num_experts
        projections = 0 if self.embedding_width in (0, self.hidden) else 2 * self.embedding_width * self.hidden
        return attention + mlps + self.num_moe_layers * shared + projections

    @property
    def embedding_parameters(self) -> int:
        """Elements of one table of the vocabulary."""
        return self.vocab * (self.embedding_width or self.hidden)

    def parameters(self) -> int:
        """Elements of all weights, tied ones once."""
        experts = 0 if self.experts is None else self.num_moe_layers * self.experts.num_experts * self.expert_parameters
        tables = self.embedding_parameters * (1 if self.is_tied else 2)
        return self.dense_parameters + experts + tables + self.positions * self.hidden + self.small_parameters

    def active_parameters(self) -> int:
        """Elements that one token is multiplied by."""
        experts = 0 if self.experts is None else self.num_moe_layers * self.experts.num_active * self.expert_parameters
        return self.dense_parameters + experts + self.embedding_parameters

    def weight_bytes(self, dtype: str | None = None) -> float:
        """Bytes of all weights (None: as stored)."""
        return self.parameters() * DTYPE_BYTES[dtype or self.dtype]

    # -- KV cache --------------------------------------------------------------------------------------------------

    def kv_elements(self, tp: int = 1) -> int:
        """What one layer keeps of one token on one of `tp` devices. Heads are shared out while there are enough; what
        latent attention keeps belongs to all heads and is kept by each device."""
        if self.latent is not None:
            return self.latent.token_elements
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    def kv_bytes_per_token(self, dtype: str = "float16", tp: int = 1) -> int:
        """Bytes that all layers keep of a token, on one of `tp` devices."""
        return int(self.num_layers * self.kv_elements(tp) * DTYPE_BYTES[dtype])

    def layers_per_stage(self, pp: int) -> int:
        """Of the largest of `pp` pipeline stages."""
        return -(-self.num_layers // pp)

    def layer_specs(self, dtype: str, layout: Layout) -> list[LayerSpec]:
        """What the layers of one device keep in the KV cache, for the largest pipeline stage."""
        elements, size = self.kv_elements(layout.tp), int(DTYPE_BYTES[dtype])
        if self.latent is None:
            heads, head_dim = max(1, self.num_kv_heads // layout.tp), self.head_dim
        else:
            heads, head_dim = 1, -(-elements // 2)  # a spec counts a key and a value of this size
        windows = self.windows[: self.layers_per_stage(layout.pp)]
        return [
            FullAttentionSpec(heads, head_dim, size)
            if window is None
            else SlidingWindowSpec(heads, head_dim, size, window=window)
            for window in windows
        ]


def find_shape(name: str) -> ModelShape:
    """A model by built-in name, config.json, or directory that holds one. Raises UserError for anything else."""
    known = built_in()
    if name.lower() in known:
        return ModelShape.from_config(known[name.lower()], name.lower())
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return ModelShape.from_config(read_json(path), path.parent.name or str(path))
    nearest = nearest_name(name.lower(), known)
    raise UserError(
        f"model {name!r} is neither a config.json nor built in{nearest} (built in: {', '.join(known)})", param="model"
    )


@cache
def built_in() -> Mapping[str, Mapping[str, Any]]:
    """Name -> config.json."""
    found: dict[str, dict[str, Any]] = json.loads(BUILT_IN.read_text("utf-8"))
    return found


# -- reading -------------------------------------------------------------------------------------------------------


def _first(fields: Fields, *keys: str, default: int | None = None) -> int:
    """The integer under the first of `keys` that is there."""
    for key in keys:
        if fields.values.get(key) is not None:
            return fields.integer(key, minimum=0)
    if default is None:
        raise fields.error(f"none of the keys {', '.join(keys)} is there")
    return default


def _read(fields: Fields, name: str) -> ModelShape:
    inner = fields.values.get("text_config")
    if isinstance(inner, Mapping):  # a model of several modalities: its language model
        fields = Fields({"model_type": "", **inner}, f"{fields.where}: text_config")
    kind = str(fields.values.get("model_type") or "")
    hidden = _first(fields, "hidden_size", "n_embd", "d_model")
    num_layers = _first(fields, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _first(fields, "num_attention_heads", "n_head")
    experts, num_moe_layers = _experts(fields, num_layers, kind)
    latent = _latent(fields)
    longest = _first(fields, "max_position_embeddings", "n_positions", "max_seq_len", default=2048)
    num_kv_heads = _first(fields, "num_key_value_heads", "num_kv_heads", default=num_heads)
    head_dim = _first(fields, "head_dim", default=hidden // num_heads)
    positions = {"opt": longest + OPT_POSITION_OFFSET, "gpt2": longest}.get(kind, 0)
    shape = ModelShape(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate=_first(
            fields, "intermediate_size_mlp", "ffn_dim", "n_inner", "intermediate_size", default=4 * hidden
        ),
        vocab=_first(fields, "vocab_size"),
        max_model_len=longest,
        windows=_windows(fields, num_layers, kind),
        dtype=_dtype(fields),
        is_gated=kind not in UNGATED,
        is_tied=fields.boolean("tie_word_embeddings", kind in TIED),
        embedding_width=_first(fields, "word_embed_proj_dim", default=hidden),
        experts=experts,
        num_moe_layers=num_moe_layers,
        latent=latent,
        positions=positions,
    )
    small = _small_parameters(fields, shape, kind)
    return ModelShape(**{**vars(shape), "small_parameters": small})


def _dtype(fields: Fields) -> str:
    """What the weights are stored in: of a quantised checkpoint the quantised type."""
    quantization = fields.values.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", ""))
        if method == "fp8":
            return "float8"
        if method in ("mxfp4",) or quantization.get("bits") == 4 or quantization.get("w_bit") == 4:
            return "int4"
        if quantization.get("bits") == 8:
            return "int8"
    stored = fields.values.get("dtype") or fields.values.get("torch_dtype")
    return stored if isinstance(stored, str) and stored in DTYPE_BYTES else "float16"


def _experts(fields: Fields, num_layers: int, kind: str) -> tuple[Experts | None, int]:
    """What the family calls its experts, and how many layers have them."""
    num_experts = _first(fields, "n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not num_experts:
        return None, 0
    active = _first(fields, "num_experts_per_tok", "experts_per_token", "moe_topk")
    width = _first(fields, "moe_intermediate_size", "intermediate_size")
    shared = _first(fields, "shared_expert_intermediate_size", default=0)
    shared = shared or _first(fields, "n_shared_experts", default=0) * width
    if kind.startswith("llama4"):
        shared = width
    first = _first(fields, "first_k_dense_replace", default=0)
    step = _first(fields, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1) or 1
    dense = fields.values.get("mlp_only_layers") or []
    sparse = [n for n in range(first, num_layers) if (n + 1) % step == 0 and n not in dense]
    return Experts(num_experts, active, width, shared), len(sparse)


def _latent(fields: Fields) -> LatentAttention | None:
    if fields.values.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=fields.integer("kv_lora_rank"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        q_rank=fields.optional_integer("q_lora_rank"),
    )


def _windows(fields: Fields, num_layers: int, kind: str) -> tuple[int | None, ...]:
    """Per layer, by whatever key the family uses; chunks of attention count as windows."""
    window = _first(fields, "sliding_window", "attention_chunk_size", default=0) or None
    if window is None or fields.values.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != num_layers:
            raise fields.error(f"layer_types must name {num_layers} layers")
        return tuple(None if each == "full_attention" else window for each in kinds)
    pattern = _first(fields, "sliding_window_pattern", "_sliding_window_pattern", default=0)
    if kind == "gemma2":
        pattern = 2
    if pattern:
        return tuple(None if (n + 1) % pattern == 0 else window for n in range(num_layers))
    first = _first(fields, "max_window_layers", default=0) if fields.values.get("use_sliding_window") else 0
    return tuple(window if n >= first else None for n in range(num_layers))


def _small_parameters(fields: Fields, shape: ModelShape, kind: str) -> int:
    """Norms and biases: they weigh nothing beside the rest, but a count should agree with the checkpoint."""
    has_bias = kind in BIASED and fields.boolean("enable_bias", True)
    norm = shape.hidden * (2 if kind in BIASED else 1)
    if not fields.boolean("layer_norm_elementwise_affine", True):
        norm = 0
    layer = norm * (4 if kind in FOUR_NORMS else 2)
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if has_bias or fields.boolean("attention_bias", False):
        layer += query + 2 * key + shape.hidden
    elif kind in ("qwen2", "qwen2_moe"):
        layer += query + 2 * key
    if has_bias or fields.boolean("mlp_bias", False):
        layer += (2 if shape.is_gated else 1) * shape.intermediate + shape.hidden
    if kind in QK_NORMS:
        layer += 2 * shape.head_dim
    if shape.latent is not None:
        layer += shape.latent.kv_rank + (shape.latent.q_rank or 0)
    has_final_norm = fields.boolean("do_layer_norm_before", True) and not fields.boolean(
        "_remove_final_layer_norm", False
    )
    return shape.num_layers * layer + (norm if has_final_norm else 0)
