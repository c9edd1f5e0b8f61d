"""What families of models do differently, as data: gates, biases, norms, windows, tied tables.

The sizes themselves are in a model's config.json; this is what it does not say, and what it means where it says
nothing. Checked against Transformers' own models (tests/simulator/test_shape.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.hf_json import Fields

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class Bias:
    """Whether a linear layer has a bias: what `key` of config.json says, else `default`. No key: the default."""

    key: str = ""
    default: bool = False

    def read(self, fields: Fields) -> bool:
        return fields.boolean(self.key, self.default) if self.key else self.default


ATTENTION_BIAS, MLP_BIAS = Bias("attention_bias"), Bias("mlp_bias")
ALWAYS, NEVER = Bias(default=True), Bias()


@dataclass(frozen=True)
class Family:
    """gated: an MLP has three matrices, not two. tied: input and output embeddings are one table where config.json does
    not say. norms: of a layer; affine: they have a bias besides. query_bias: also of keys and values. head_norms:
    norms of queries and keys, "head" (a weight for each element of one head), "whole" (of all heads) or None; where
    head_norms_key is given, only if that key says so. head_dim: where config.json does not say. windows: which layers
    have the sliding window of a config.json without `layer_types`: "none", "everywhere", "qwen" (if
    `use_sliding_window`, from `max_window_layers` on), or n: all but every n-th. position_rows: of a table of learned
    positions, more than there are positions; None: no table.
    """

    gated: bool = True
    tied: bool = False
    norms: int = 2
    affine: bool = False
    query_bias: Bias = ATTENTION_BIAS
    output_bias: Bias = ATTENTION_BIAS
    mlp_bias: Bias = MLP_BIAS
    head_norms: str | None = None
    head_norms_key: str = ""
    head_dim: int | None = None
    windows: str | int = "none"
    position_rows: int | None = None
    expert_bias: bool = False
    has_sinks: bool = False
    """An attention sink for each head."""
    has_shared_gate: bool = False
    """A gate over the shared expert."""


_OPT_BIAS = Bias("enable_bias", True)
_STARCODER_BIAS = Bias("use_bias", True)
_NEOX_BIAS = Bias("attention_bias", True)
_GEMMA = Family(tied=True, mlp_bias=NEVER, head_dim=256)
_SPARSE = Family(mlp_bias=NEVER)

FAMILIES: Mapping[str, Family] = {
    "cohere": Family(tied=True, norms=1, mlp_bias=NEVER, head_norms="whole", head_norms_key="use_qk_norm"),
    "cohere2": Family(tied=True, norms=1, mlp_bias=NEVER, windows=4),
    "deepseek_v2": Family(),
    "deepseek_v3": _SPARSE,
    "gemma": _GEMMA,
    "gemma2": Family(tied=True, mlp_bias=NEVER, head_dim=256, norms=4, windows=2),
    "gemma3_text": Family(tied=True, mlp_bias=NEVER, head_dim=256, norms=4, head_norms="head", windows=6),
    "glm4": Family(norms=4, query_bias=Bias("attention_bias", True), output_bias=NEVER, mlp_bias=NEVER),
    "glm4_moe": Family(output_bias=NEVER, mlp_bias=NEVER, head_norms="head", head_norms_key="use_qk_norm"),
    "gpt2": Family(
        gated=False,
        tied=True,
        affine=True,
        query_bias=ALWAYS,
        output_bias=ALWAYS,
        mlp_bias=ALWAYS,
        position_rows=0,
    ),
    "gpt_neox": Family(gated=False, affine=True, query_bias=_NEOX_BIAS, output_bias=_NEOX_BIAS, mlp_bias=ALWAYS),
    "gpt_oss": Family(
        query_bias=Bias("attention_bias", True),
        output_bias=Bias("attention_bias", True),
        mlp_bias=NEVER,
        windows=2,
        expert_bias=True,
        has_sinks=True,
    ),
    "granite": Family(),
    "granitemoe": _SPARSE,
    "llama": Family(),
    "llama4_text": Family(mlp_bias=NEVER, windows=4),
    "minimax_m2": Family(query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, head_norms="whole"),
    "ministral": Family(query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere"),
    "mistral": Family(query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere"),
    "mixtral": Family(query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere"),
    "olmo2": Family(mlp_bias=NEVER, head_norms="whole"),
    "olmo3": Family(mlp_bias=NEVER, head_norms="whole", windows=4),
    "olmoe": Family(mlp_bias=NEVER, head_norms="whole"),
    "opt": Family(
        gated=False,
        tied=True,
        affine=True,
        query_bias=_OPT_BIAS,
        output_bias=_OPT_BIAS,
        mlp_bias=_OPT_BIAS,
        position_rows=2,
    ),
    "phi3": Family(query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere"),
    "qwen2": Family(query_bias=ALWAYS, output_bias=NEVER, mlp_bias=NEVER, windows="qwen"),
    "qwen2_moe": Family(
        query_bias=Bias("qkv_bias", True), output_bias=NEVER, mlp_bias=NEVER, windows="qwen", has_shared_gate=True
    ),
    "qwen3": Family(mlp_bias=NEVER, head_norms="head", head_dim=128, windows="qwen"),
    "qwen3_moe": Family(mlp_bias=NEVER, head_norms="head", windows="qwen"),
    "seed_oss": Family(
        query_bias=Bias("attention_bias", True), output_bias=Bias("attention_out_bias"), mlp_bias=MLP_BIAS, head_dim=128
    ),
    "smollm3": Family(tied=True, windows="qwen"),
    "starcoder2": Family(
        gated=False,
        tied=True,
        affine=True,
        query_bias=_STARCODER_BIAS,
        output_bias=_STARCODER_BIAS,
        mlp_bias=_STARCODER_BIAS,
        windows="everywhere",
    ),
}
OTHER = Family(head_norms="head", head_norms_key="use_qk_norm", windows="everywhere")
"""How a model of an unknown type is read: gated, with norms and no biases unless its config.json says so."""

ALIASES: Mapping[str, str] = {"gemma3": "gemma3_text", "kimi_k2": "deepseek_v3", "llama4": "llama4_text"}
ARCHITECTURES: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Of models that Quire runs or is asked about most: the class decides, as it does for the engine."""

RECURRENT_KEYS = (
    "mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_attn_config",
    "conv_L_cache", "layers_block_type", "rwkv", "lru_width",
)  # fmt: skip
"""Signs of layers that keep a state instead of keys and values, of which nothing is known here."""


def model_type(fields: Fields) -> str:
    """The family's name, by the model's class or else by `model_type`."""
    names = fields.values.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    kind = str(fields.values.get("model_type") or "")
    return ALIASES.get(kind, kind)


def family_of(kind: str, fields: Fields) -> Family:
    """Raises ModelLoadError for a model that is not made of attention and MLPs alone."""
    for key in RECURRENT_KEYS:
        if fields.values.get(key) is not None:
            raise fields.error(f"the shape of models with recurrent layers ({key}) is not known")
    return FAMILIES.get(kind, OTHER)


def windows(fields: Fields, family: Family, num_layers: int) -> Windows:
    """The attention window of each layer, None for full attention; a chunk of attention counts as a window."""
    full: Windows = (None,) * num_layers
    sizes = [fields.optional_integer(key, minimum=0) for key in ("sliding_window", "attention_chunk_size")]
    window, rule = sizes[0] or sizes[1], family.windows
    if not window or rule == "none":
        return full
    if rule == "qwen" and not fields.boolean("use_sliding_window", False):
        return full
    if family is OTHER and not fields.boolean("use_sliding_window", True):
        return full
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error(f"layer_types must name {num_layers} layers")
        return tuple(None if kind == "full_attention" else window for kind in kinds)
    if rule == "qwen":
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    every = rule if isinstance(rule, int) else num_layers + 1
    for key in ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"):
        every = fields.optional_integer(key) or every
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers))
