"""Facts about a family of models that config.json does not hold, and the step from config.json to a shape. Tested
against Transformers' models (tests/simulator/test_shape.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH
from quire.config.model_shape import DTYPE_BYTES, AttentionShape, Experts, Kind, LayerShape, Matrix, ModelShape
from quire.config.rope import LLAMA_DEFAULTS, RopeDefaults

Layer = tuple[AttentionShape, tuple[Matrix, ...], int]
"""(attention, its matrices, number of elements of its vectors)."""


@dataclass(frozen=True)
class Bias:
    """Presence of a linear layer's bias: `key` in config.json, else `default`."""

    key: str = ""
    default: bool = False

    def read(self, fields: Fields) -> bool:
        return fields.boolean(self.key, self.default) if self.key else self.default


ATTENTION_BIAS, MLP_BIAS = Bias("attention_bias"), Bias("mlp_bias")
ALWAYS, NEVER = Bias(default=True), Bias()


EXPERT = "{expert}"
"""Index of an expert, in Hugging Face names of matrices that a GGUF file stacks."""
HEAD = "{head}"
"""Index of a head, in names of matrices that a GGUF file stacks."""


@dataclass(frozen=True)
class GGUFNames:
    """A family's names in GGUF files, for reading and writing. architecture: value of "general.architecture".
    interleaved: elements of a rotated pair are neighbours (Hugging Face: half a head apart). windowed: class of a model
    with a sliding window and the same architecture; "": none. top, layer: tensors outside and inside the layers ->
    Hugging Face names. activation: the MLP's. norm_offset: difference of a file's norm weights to Hugging Face's. caps:
    keys of soft caps, in the metadata and in config.json. largest: layers of the model whose scores are divided by the
    root of the hidden size per head (Gemma's 27B). gating: value of "expert_gating_func" that identifies the family; 0:
    any. tiled: value heads of a state are ordered by their number within a key head. layers: Hugging Face name of the
    list of layers. settings, rope: keys of config.json and of its RoPE settings that files omit."""

    architecture: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    interleaved: bool = False
    windowed: str = ""
    activation: str = "silu"
    norm_offset: float = 0.0
    caps: tuple[str, ...] = ()
    largest: int = 0
    gating: int = 0
    tiled: bool = False
    layers: str = "model.layers"
    settings: Mapping[str, object] = field(default_factory=dict)
    rope: Mapping[str, object] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        return any(EXPERT in place for place in self.layer.values())


@dataclass(frozen=True)
class Family:
    """Description of a model family's config.json. model_type, aliases: names in config.json. architectures: classes;
    GGUF files get the first. is_runnable: the engine has its layers; others can only be planned and simulated.
    hidden_size to intermediate, embedding_width, window: keys of sizes; the first that exists counts.
    intermediate_factor: default MLP width in hidden sizes (None: the key is required for a runnable family, 4 for
    others). Empty num_kv_heads: as many as heads. gated: an MLP has three matrices, not two. tied: default of tied
    embeddings. norms: norms of a layer. affine: they have a bias. query_bias: bias of queries, keys and values.
    head_norms: norms of queries and keys: "head" (per head), "whole" (over all heads) or None; with head_norms_key only
    if that key is true. output_gate: the query projection also makes a gate.

    windows: layers with a sliding window without `layer_types`: "none", "everywhere", "unless" (`use_sliding_window` is
    false), "if" (it is true), "qwen" (if true, from `max_window_layers` on), "qwen_moe" (if true, every other one below
    `max_window_layers`), "unrotated" (if true, those without rotation), or n: all but every n-th, first layer n - 1.
    layer_types: known names in `layer_types`. has_chunks: windows are chunks of positions, in the layers that
    `no_rope_layers` marks as rotated. is_interleaved: a rotated pair's elements are neighbours. fused: checkpoint
    tensors that join several projections. position_rows: surplus rows of the table of learned positions; None:
    positions are rotated. unused_positions: number of first positions without tokens. is_bidirectional: an encoder; it
    caches nothing. has_sinks: an attention sink for each head. has_latents, has_experts: the engine runs them.
    has_index: an indexer chooses what latent attention reads. has_shared_gate: a gate over the shared expert.
    corrects_choice: experts are chosen by corrected scores. shares_expert: every token passes one more expert.
    sparse_from: first layer with experts. state_layer: makes a layer with a state from the configuration and the hidden
    size. state_layers: True for each such layer without `layer_types`.

    usual_values: keys read besides sizes and rotation, with Transformers' defaults; other keys are ignored. Empty: all
    keys are read. nullable: keys of usual_values for which null means "none". renamed: other names of keys -> keys.
    refused: unsupported keys -> values that change nothing. checkpoint_base: prefix that checkpoints of the bare model
    omit. checkpoint_surplus: pattern of tensors to ignore. draft_prefix: prefix of a draft head's tensors. draft_layer:
    name of a tensor of a draft head stored as the layer after the last.
    """

    model_type: str
    architectures: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_runnable: bool = False
    hidden_size: tuple[str, ...] = ("hidden_size",)
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    max_positions: tuple[str, ...] = ("max_position_embeddings",)
    intermediate: tuple[str, ...] = ("intermediate_size",)
    intermediate_factor: int | None = None
    embedding_width: tuple[str, ...] = ()
    gated: bool = True
    tied: bool = False
    norms: int = 2
    affine: bool = False
    query_bias: Bias = ATTENTION_BIAS
    output_bias: Bias = ATTENTION_BIAS
    mlp_bias: Bias = MLP_BIAS
    head_norms: str | None = None
    head_norms_key: str = ""
    output_gate: bool = False
    head_dim: int | None = None
    windows: str | int = "none"
    window: tuple[str, ...] = ("sliding_window",)
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    has_chunks: bool = False
    rope: RopeDefaults = LLAMA_DEFAULTS
    is_interleaved: bool = False
    fused: tuple[str, ...] = ()
    position_rows: int | None = None
    unused_positions: int = 0
    is_bidirectional: bool = False
    expert_bias: bool = False
    has_sinks: bool = False
    has_latents: bool = False
    has_index: bool = False
    has_experts: bool = False
    has_shared_gate: bool = False
    corrects_choice: bool = False
    shares_expert: bool = False
    sparse_from: int = 0
    state_layer: Callable[[Fields, int], Layer] | None = None
    state_layers: Callable[[Fields, int], tuple[bool, ...]] | None = None
    usual_values: Mapping[str, Any] = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    checkpoint_base: str = "model."
    checkpoint_surplus: str = r"rotary_emb\.inv_freq$"
    draft_prefix: str = ""
    draft_layer: str = ""
    gguf: GGUFNames | None = None

    def read(self, fields: Fields, name: str) -> ModelShape:
        """Read a config.json's shape. Raises ModelLoadError with file and key."""
        hidden = first(fields, *self.hidden_size, maximum=MAX_WIDTH)
        num_layers = first(fields, *self.num_layers, maximum=MAX_LAYERS)
        factor = self.intermediate_factor or (None if self.is_runnable else 4)
        usual = None if factor is None else factor * hidden
        intermediate = first(fields, *self.intermediate, default=usual, maximum=MAX_WIDTH)
        attention = self._attention(fields, hidden)
        longest = first(fields, *self.max_positions, default=None if self.is_runnable else 2048, maximum=MAX_POSITIONS)
        longest -= self.unused_positions
        windows = self._windows(fields, num_layers)
        states = self._states(fields, num_layers)
        experts, sparse = self._experts(fields, num_layers)
        norm, has_final_norm = hidden, True
        if self.affine:
            norm *= 2 if fields.boolean("layer_norm_elementwise_affine", True) else 0
            removed = fields.boolean("_remove_final_layer_norm", False)
            has_final_norm = fields.boolean("do_layer_norm_before", True) and not removed
        biases = ((2 if self.gated else 1) * intermediate + hidden) if self.mlp_bias.read(fields) else 0
        made: dict[tuple[int | None, bool, bool], LayerShape] = {}
        for kind in zip(windows, states, sparse, strict=True):
            if kind in made:
                continue
            window, is_state, is_sparse = kind
            if is_state and self.state_layer is not None:
                attends, projections, vectors = self.state_layer(fields, hidden)
            else:
                attends, projections, vectors = attention(window)
            vectors += self.norms * norm + (self._expert_vectors(experts, hidden) if is_sparse and experts else biases)
            made[kind] = LayerShape(
                attends,
                projections,
                0 if is_sparse else intermediate,
                experts if is_sparse else None,
                self.gated,
                vectors,
            )
        dtype, expert_dtype = _dtypes(fields)
        return ModelShape(
            name=name,
            family=self.model_type,
            layers=tuple(made[kind] for kind in zip(windows, states, sparse, strict=True)),
            hidden=hidden,
            vocab=first(fields, "vocab_size", maximum=MAX_WIDTH),
            max_model_len=longest,
            dtype=dtype,
            expert_dtype=expert_dtype,
            is_tied=fields.boolean("tie_word_embeddings", self.tied),
            embedding_width=first(fields, *self.embedding_width, default=hidden, maximum=MAX_WIDTH),
            positions=0 if self.position_rows is None else longest + self.position_rows,
            num_vectors=norm if has_final_norm else 0,
        )

    # -- attention --------------------------------------------------------------------------------------------------

    def _attention(self, fields: Fields, hidden: int) -> Callable[[int | None], Layer]:
        num_heads = first(fields, *self.num_heads, maximum=MAX_HEADS)
        if self.has_latents or (fields.values.get("kv_lora_rank") is not None and not self.is_runnable):
            latent = self._latent(fields, hidden, num_heads)
            return lambda window: latent
        num_kv_heads = first(fields, *self.num_kv_heads, default=num_heads) if self.num_kv_heads else num_heads
        if num_heads % num_kv_heads:
            raise fields.error(
                f"{self.num_heads[0]} ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
            )
        dim = fields.optional_integer("head_dim", maximum=MAX_HEAD_DIM) if self.num_kv_heads else None
        dim = dim or self.head_dim
        if dim is None:
            if hidden % num_heads:
                raise fields.error(
                    f"{self.hidden_size[0]} ({hidden}) must be a multiple of {self.num_heads[0]} ({num_heads})"
                )
            dim = hidden // num_heads
        query, key = num_heads * dim, num_kv_heads * dim
        gate = query if self.output_gate else 0
        vectors = num_heads if self.has_sinks else 0
        if self.query_bias.read(fields):
            vectors += query + gate + 2 * key
        if self.output_bias.read(fields):
            vectors += hidden
        if self.head_norms and (not self.head_norms_key or fields.boolean(self.head_norms_key, False)):
            vectors += 2 * dim if self.head_norms == "head" else query + key
        projections = ((hidden, query + gate + 2 * key), (query, hidden))

        def layer(window: int | None) -> Layer:
            windowed: Kind = "chunked" if self.has_chunks else "sliding"
            kind: Kind = "none" if self.is_bidirectional else "full" if window is None else windowed
            return AttentionShape(kind, num_heads, num_kv_heads, dim, dim, window), projections, vectors

        return layer

    def _latent(self, fields: Fields, hidden: int, num_heads: int) -> Layer:
        rank, rope_dim = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
        nope_dim, value_dim = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
        query_rank = fields.optional_integer("q_lora_rank")
        query = num_heads * (nope_dim + rope_dim)
        queries = ((hidden, query),) if query_rank is None else ((hidden, query_rank), (query_rank, query))
        projections = (
            *queries,
            (hidden, rank + rope_dim),
            (rank, num_heads * (nope_dim + value_dim)),
            (num_heads * value_dim, hidden),
        )
        vectors = (query_rank or 0) + rank
        if self.query_bias.read(fields):
            vectors += (query_rank or 0) + rank + rope_dim
        if self.output_bias.read(fields):
            vectors += hidden
        num_kv_heads = first(fields, *self.num_kv_heads, default=num_heads)
        index_heads = index_dim = index_top = 0
        if self.has_index:
            if query_rank is None:
                raise fields.error("q_lora_rank is missing: the indexer takes compressed queries")
            index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
            index_top = fields.integer("index_topk")
            if rope_dim > index_dim:
                raise fields.error(f"index_head_dim ({index_dim}) must be at least qk_rope_head_dim ({rope_dim})")
            projections += (query_rank, index_heads * index_dim), (hidden, index_dim), (hidden, index_heads)
            vectors += 2 * index_dim
        attention = AttentionShape(
            "latent",
            num_heads,
            num_kv_heads,
            nope_dim + rope_dim,
            value_dim,
            latent_dim=rank + rope_dim,
            latent_rank=rank,
            index_heads=index_heads,
            index_dim=index_dim,
            index_top=index_top,
        )
        return attention, projections, vectors

    def _states(self, fields: Fields, num_layers: int) -> tuple[bool, ...]:
        if self.state_layers is None:
            return (False,) * num_layers
        kinds = names(fields, "layer_types", num_layers, ("linear_attention", "full_attention"))
        if kinds is None:
            return self.state_layers(fields, num_layers)
        return tuple(kind == "linear_attention" for kind in kinds)

    def _windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        full, rule = (None,) * num_layers, self.windows
        if rule == "none":
            return full
        sizes = [fields.optional_integer(key, minimum=0) for key in self.window]
        window = next(filter(None, sizes), None)
        is_used = not isinstance(rule, str) or rule == "everywhere"
        is_used = is_used or fields.boolean("use_sliding_window", rule == "unless")
        kinds = names(fields, "layer_types", num_layers, self.layer_types)
        if kinds is not None:
            layers = tuple(kind != "full_attention" for kind in kinds)
        else:
            layers = self._windowed(fields, num_layers) if is_used else (False,) * num_layers
        # SmolLM 3 asks `use_sliding_window` only where `layer_types` is absent.
        if window is not None and (is_used or rule == "unrotated"):
            return tuple(window if is_windowed else None for is_windowed in layers)
        is_asked = 0 in sizes or kinds is not None or isinstance(rule, int)
        if self.is_runnable and any(layers) and is_asked:
            reason = "use_sliding_window is false" if window is not None else f"{self.window[0]} is {shown(sizes[0])}"
            raise fields.error(f"{reason}, and layers of the model have a window")
        return full

    def _windowed(self, fields: Fields, num_layers: int) -> tuple[bool, ...]:
        if self.has_chunks or self.windows == "unrotated":
            turned = self.rope.rotated_layers(fields, num_layers)
            return tuple(is_turned == self.has_chunks for is_turned in turned)
        if self.windows == "qwen":
            start = fields.integer("max_window_layers", 28, minimum=0)
            return tuple(layer >= start for layer in range(num_layers))
        if self.windows == "qwen_moe":
            end = fields.integer("max_window_layers", 28, minimum=0)
            return tuple(layer % 2 == 0 and layer < end for layer in range(num_layers))
        every = self.windows if isinstance(self.windows, int) else num_layers + 1
        for key in ("sliding_window_pattern", "no_rope_layer_interval"):
            every = fields.optional_integer(key) or every
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))

    # -- experts ----------------------------------------------------------------------------------------------------

    def _experts(self, fields: Fields, num_layers: int) -> tuple[Experts | None, tuple[bool, ...]]:
        num_experts = first(fields, "n_routed_experts", "num_local_experts", "num_experts", default=0)
        if not num_experts or (self.is_runnable and not self.has_experts):
            return None, (False,) * num_layers
        active = first(fields, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
        if active > num_experts:
            raise fields.error(f"a token cannot pick {active} of {num_experts} experts")
        width = first(fields, "moe_intermediate_size", "intermediate_size")
        shared = first(fields, "shared_expert_intermediate_size", default=0)
        shared = shared or first(fields, "n_shared_experts", "num_shared_experts", default=0) * width
        if self.shares_expert:
            shared = width
        kinds = names(fields, "mlp_layer_types", num_layers, ("dense", "sparse"))
        if kinds is not None:
            return Experts(num_experts, active, width, shared), tuple(kind == "sparse" for kind in kinds)
        listed = fields.values.get("moe_layers")
        if listed is not None:
            if not isinstance(listed, list):
                raise fields.error("moe_layers must list layers")
            return Experts(num_experts, active, width, shared), tuple(n in listed for n in range(num_layers))
        start = fields.optional_integer("first_k_dense_replace", minimum=0)
        start = self.sparse_from if start is None else start
        step = first(fields, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1)
        dense = fields.values.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise fields.error("mlp_only_layers must list layers")
        sparse = tuple(n >= start and (n + 1) % step == 0 and n not in dense for n in range(num_layers))
        return Experts(num_experts, active, width, shared), sparse

    def _expert_vectors(self, experts: Experts, hidden: int) -> int:
        biases = experts.num_experts * (2 * experts.intermediate + hidden + 1) if self.expert_bias else 0
        corrections = experts.num_experts if self.corrects_choice else 0
        return biases + corrections + (hidden if self.has_shared_gate else 0)


def first(fields: Fields, *keys: str, default: int | None = None, maximum: int = MAX_WIDTH) -> int:
    """Integer under the first existing key; 0 only where that is the default."""
    for key in keys:
        if fields.values.get(key) is not None:
            return fields.integer(key, minimum=0 if default == 0 else 1, maximum=maximum)
    if default is None:
        if len(keys) == 1:
            return fields.integer(keys[0])
        raise fields.error(f"none of the keys {', '.join(keys)} is there")
    return default


def names(fields: Fields, key: str, num_layers: int, known: tuple[str, ...]) -> list[str] | None:
    """Kind of each layer (such as "full_attention") from a list of config.json, each one of `known`; None without the
    key."""
    kinds = fields.values.get(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.error(f"{key} must name {num_layers} layers, each one of {', '.join(known)}")
    return kinds


def _dtypes(fields: Fields) -> tuple[str, str]:
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
