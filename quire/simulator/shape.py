"""The shape of a model: what its Hugging Face config.json says about sizes, for any family.

`models.json` holds the configurations of some models by name, sizes only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.hf_config import read_config
from quire.config.hf_json import Fields, read_json
from quire.config.model import ModelConfig
from quire.config.options import BUNDLED_MODEL
from quire.config.parallel import ParallelConfig
from quire.errors import UserError, nearest_name
from quire.kv_cache.spec import FullAttentionSpec, LayerSpec, SlidingWindowSpec
from quire.simulator.families import FAMILIES, Family, family_of, model_type, windows
from quire.simulator.hardware import DTYPE_BYTES

BUILT_IN = Path(__file__).with_name("models.json")
QUANTIZED = ("float8", "int8", "int4", "mxfp4")
"""Types that matrices of layers are quantised to; the tables of the vocabulary stay in 16 bits."""


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
    expert_dtype: str = ""
    """What experts are stored in; "": as the rest."""
    family: str = ""
    is_known: bool = True
    """Whether the family's norms and biases are known; else they are guessed from the configuration's keys."""

    @classmethod
    def from_config(cls, config: ModelConfig | Mapping[str, Any], name: str = "model") -> ModelShape:
        """From the product's configuration of a model, or the contents of any config.json.

        Raises ModelLoadError that names the key which is missing or wrong.
        """
        if isinstance(config, ModelConfig):
            shape = _read(Fields(config.hf, str(config.path)), config.name)
            quantized = None if config.quantization is None else f"int{config.quantization.bits}"
            return replace(
                shape,
                windows=config.sliding_windows,
                max_model_len=config.max_model_len,
                dtype=quantized or config.dtype,
                expert_dtype=quantized or config.dtype,
            )
        return _read(Fields(config, name), name)

    # -- parameters -------------------------------------------------------------------------------------------------

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
        tables = self.embedding_parameters * (1 if self.is_tied else 2)
        return (
            self.dense_parameters
            + self.routed_parameters
            + tables
            + self.positions * self.hidden
            + self.small_parameters
        )

    def active_parameters(self) -> int:
        """Elements that one token is multiplied by."""
        experts = 0 if self.experts is None else self.num_moe_layers * self.experts.num_active * self.expert_parameters
        return self.dense_parameters + experts + self.embedding_parameters

    @property
    def looked_up_parameters(self) -> int:
        """Elements of tables of which a token reads one row: input embeddings that are not tied, learned positions."""
        return self.positions * self.hidden + (0 if self.is_tied else self.embedding_parameters)

    @property
    def routed_parameters(self) -> int:
        """Elements of all experts that tokens are routed to."""
        return 0 if self.experts is None else self.num_moe_layers * self.experts.num_experts * self.expert_parameters

    def weight_bytes(self, dtype: str | None = None) -> float:
        """Bytes of all weights, in one dtype or (None) as stored: of a quantised checkpoint the matrices of the layers
        are, its tables, norms and biases have 16 bits."""
        if dtype is not None:
            return self.parameters() * DTYPE_BYTES[dtype]
        routed = self.routed_parameters
        rest = self.parameters() - self.dense_parameters - routed
        plain = 2 if self.dtype in QUANTIZED else DTYPE_BYTES[self.dtype]
        return (
            self.dense_parameters * DTYPE_BYTES[self.dtype]
            + routed * DTYPE_BYTES[self.expert_dtype or self.dtype]
            + rest * plain
        )

    # -- KV cache ---------------------------------------------------------------------------------------------------

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of KV cache of one layer and token on one of `tp` devices. Heads are shared out while there are
        enough; what latent attention keeps belongs to all heads and is kept by each device."""
        if self.latent is not None:
            return self.latent.token_elements
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    def kv_bytes_per_token(self, dtype: str = "float16", tp: int = 1) -> int:
        """Bytes that all layers keep of a token, on one of `tp` devices."""
        return int(self.num_layers * self.kv_elements(tp) * DTYPE_BYTES[dtype])

    def layers_per_stage(self, pp: int) -> int:
        """Of the largest of `pp` pipeline stages."""
        return -(-self.num_layers // pp)

    def layer_specs(self, dtype: str, layout: ParallelConfig) -> list[LayerSpec]:
        """The KV specs of the layers of one device, for the largest pipeline stage."""
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


def find_shape(name: str, revision: str | None = None) -> ModelShape:
    """A model by built-in name, config.json, directory or GGUF file, "bundled", or hub id ("owner/name", of which only
    the configuration is fetched). Raises UserError or ModelLoadError for anything else."""
    known = built_in()
    if name.lower() in known:
        return ModelShape.from_config(known[name.lower()], name.lower())
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return ModelShape.from_config(read_json(path), path.parent.name or str(path))
    if name == BUNDLED_MODEL or path.exists() or "/" in name:
        return ModelShape.from_config(read_config(name, revision), name)
    nearest = nearest_name(name.lower(), known)
    raise UserError(
        f"model {name!r} is neither a config.json nor built in{nearest} (built in: {', '.join(known)})", param="model"
    )


@cache
def built_in() -> Mapping[str, Mapping[str, Any]]:
    """Name -> config.json."""
    found: dict[str, dict[str, Any]] = json.loads(BUILT_IN.read_text("utf-8"))
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def _first(fields: Fields, *keys: str, default: int | None = None) -> int:
    """The integer under the first of `keys` that is there; 0 only where that is the default."""
    for key in keys:
        if fields.values.get(key) is not None:
            return fields.integer(key, minimum=0 if default == 0 else 1)
    if default is None:
        raise fields.error(f"none of the keys {', '.join(keys)} is there")
    return default


def _read(fields: Fields, name: str) -> ModelShape:
    inner = fields.values.get("text_config")
    outer = fields
    if isinstance(inner, Mapping):  # a model of several modalities: its language model
        fields = Fields(inner, f"{fields.where}: text_config")
    kind = model_type(fields)
    family = family_of(kind, fields)
    hidden = _first(fields, "hidden_size", "n_embd", "d_model")
    num_layers = _first(fields, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _first(fields, "num_attention_heads", "n_head")
    num_kv_heads = _first(fields, "num_key_value_heads", "num_kv_heads", default=num_heads)
    experts, num_moe_layers = _experts(fields, num_layers, kind)
    latent = _latent(fields)
    if latent is None and num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
    head_dim = _first(fields, "head_dim", default=family.head_dim or hidden // num_heads)
    longest = _first(fields, "max_position_embeddings", "n_positions", "max_seq_len", default=2048)
    dtype, expert_dtype = _dtypes(outer)
    shape = ModelShape(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim if latent is None else latent.nope_dim + latent.rope_dim,
        intermediate=_first(
            fields, "intermediate_size_mlp", "ffn_dim", "n_inner", "intermediate_size", default=4 * hidden
        ),
        vocab=_first(fields, "vocab_size"),
        max_model_len=longest,
        windows=windows(fields, family, num_layers),
        dtype=dtype,
        expert_dtype=expert_dtype,
        is_gated=family.gated,
        is_tied=outer.boolean("tie_word_embeddings", fields.boolean("tie_word_embeddings", family.tied)),
        embedding_width=_first(fields, "word_embed_proj_dim", default=hidden),
        experts=experts,
        num_moe_layers=num_moe_layers,
        latent=latent,
        positions=0 if family.position_rows is None else longest + family.position_rows,
        family=kind,
        is_known=kind in FAMILIES,
    )
    return replace(shape, small_parameters=_small_parameters(fields, shape, family))


def _dtypes(fields: Fields) -> tuple[str, str]:
    """The dtypes that the matrices of the layers, and of their experts, are stored in."""
    stored = fields.values.get("dtype") or fields.values.get("torch_dtype")
    plain = stored if isinstance(stored, str) and stored in DTYPE_BYTES else "bfloat16"
    quantization = fields.values.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return plain, plain
    method, bits = quantization.get("quant_method"), quantization.get("bits") or quantization.get("w_bit")
    if method == "mxfp4":
        return plain, "mxfp4"
    quantized = "float8" if method == "fp8" else {4: "int4", 8: "int8"}.get(bits if isinstance(bits, int) else 0, plain)
    return quantized, quantized


def _experts(fields: Fields, num_layers: int, kind: str) -> tuple[Experts | None, int]:
    """What the family calls its experts, and how many layers have them."""
    num_experts = _first(fields, "n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not num_experts:
        return None, 0
    active = _first(fields, "num_experts_per_tok", "experts_per_token", "moe_topk")
    if active > num_experts:
        raise fields.error(f"a token cannot pick {active} of {num_experts} experts")
    width = _first(fields, "moe_intermediate_size", "intermediate_size")
    shared = _first(fields, "shared_expert_intermediate_size", default=0)
    shared = shared or _first(fields, "n_shared_experts", default=0) * width
    if kind == "llama4_text":
        shared = width
    first = _first(fields, "first_k_dense_replace", default=0)
    step = _first(fields, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1)
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


def _small_parameters(fields: Fields, shape: ModelShape, family: Family) -> int:
    """Norms and biases: they weigh little beside the rest, but a count should agree with the checkpoint."""
    norm = shape.hidden * (2 if family.affine else 1)
    if not fields.boolean("layer_norm_elementwise_affine", True):
        norm = 0
    layer = family.norms * norm + _attention_vectors(fields, shape, family)
    dense = 0
    if family.mlp_bias.read(fields):
        dense = (2 if shape.is_gated else 1) * shape.intermediate + shape.hidden
    sparse = 0
    if shape.experts is not None:
        experts = shape.experts
        if family.expert_bias:
            sparse = experts.num_experts * (2 * experts.intermediate + shape.hidden + 1)
        if family.has_shared_gate:
            sparse += shape.hidden
    has_final_norm = fields.boolean("do_layer_norm_before", True) and not fields.boolean(
        "_remove_final_layer_norm", False
    )
    return (
        shape.num_layers * layer
        + (shape.num_layers - shape.num_moe_layers) * dense
        + shape.num_moe_layers * sparse
        + (norm if has_final_norm else 0)
    )


def _attention_vectors(fields: Fields, shape: ModelShape, family: Family) -> int:
    """Biases, norms and sinks of one layer's attention."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    count = shape.num_heads if family.has_sinks else 0
    if family.output_bias.read(fields):
        count += shape.hidden
    if shape.latent is not None:
        down = shape.latent.q_rank or 0
        if family.query_bias.read(fields):
            count += down + shape.latent.token_elements
        return count + down + shape.latent.kv_rank
    if family.query_bias.read(fields):
        count += query + 2 * key
    if family.head_norms is not None and (not family.head_norms_key or fields.boolean(family.head_norms_key, False)):
        count += 2 * shape.head_dim if family.head_norms == "head" else query + key
    return count
