"""Rotary position embeddings as config.json describes them, in Transformers 4 style (`rope_theta`, `rope_scaling`)
and Transformers 5 style (`rope_parameters`). `layers/rotary.py` turns this into frequencies."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.families import family_of
from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_POSITIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_STRETCHING = ("linear", "dynamic", "yarn")
_ALIASES = {"su": "longrope"}


@dataclass(frozen=True)
class RopeConfig:
    """rotary_dim: leading elements of a head that are rotated (even). max_position_embeddings: config.json's own.
    original_max_position_embeddings: tokens that the model was trained on before its context was stretched.
    attention_factor: multiplies cos and sin; None takes the scaling's usual value. The rest belongs to one
    `rope_type` each, under Transformers' names.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def longest(self) -> int:
        """Most positions that the scaling is meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * (self.factor or 1.0))
        if self.rope_type == "yarn":
            stretched = int(self.original_max_position_embeddings * (self.factor or 1.0))
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def usual_length(self) -> int:
        """The default of `max_model_len`. Dynamic scaling changes nothing up to the trained length and everything
        beyond it, so beyond is for those who ask."""
        return self.max_position_embeddings if self.rope_type == "dynamic" else self.longest


def read_rope(config: Fields, head_dim: int) -> RopeConfig:
    """Read config.json's RoPE settings. Raises ModelLoadError for an unknown type or a missing or absurd value."""
    raw = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise config.error(f"the RoPE settings must be an object, not {shown(raw)}")
    if any(isinstance(value, dict) for value in raw.values()):
        raise config.error("RoPE settings that differ by layer are not supported")
    rope = Fields(raw, f"{config.where} (RoPE settings)")
    max_positions = config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    named = rope.text("rope_type" if raw.get("rope_type") else "type", "default") or "default"
    rope_type = _ALIASES.get(named, named)
    if rope_type not in ROPE_TYPES:
        raise rope.error(f"rope_type {shown(named)} is not supported (known: {', '.join(ROPE_TYPES)})")
    # A top-level value has priority over the nested one: so do the models that write it there.
    original = config.optional_integer("original_max_position_embeddings", maximum=MAX_POSITIONS)
    if original is None:
        original = rope.integer("original_max_position_embeddings", max_positions, maximum=MAX_POSITIONS)
    rotary_dim = _rotary_dim(config, rope, head_dim)
    factor = rope.optional_number("factor")
    if factor is None and rope_type in ("linear", "dynamic", "llama3"):
        raise rope.error(f"the key 'factor' is missing (rope_type {rope_type!r})")
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = max_positions / original
    if factor is not None and rope_type in _STRETCHING and max(max_positions, original) * factor > MAX_POSITIONS:
        raise rope.error(f"factor {factor:g} stretches the model to more than {MAX_POSITIONS} positions")
    is_longrope = rope_type == "longrope"
    return RopeConfig(
        rope_type=rope_type,
        theta=rope.optional_number("rope_theta") or config.optional_number("rope_theta") or _usual_theta(config),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_positions,
        original_max_position_embeddings=original,
        factor=factor,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        short_factor=rope.numbers("short_factor", rotary_dim // 2) if is_longrope else (),
        long_factor=rope.numbers("long_factor", rotary_dim // 2) if is_longrope else (),
    )


def _usual_theta(config: Fields) -> float:
    """What the model's family takes where config.json does not say."""
    family = family_of(config.values)
    if family is None:
        raise config.error("the key 'rope_theta' is missing")
    return family.rope_theta


def _rotary_dim(config: Fields, rope: Fields, head_dim: int) -> int:
    share = rope.optional_number("partial_rotary_factor") or config.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise config.error(
            f"partial_rotary_factor {share:g} of head_dim {head_dim} must leave an even number of at least 2 "
            "elements to rotate"
        )
    return rotary_dim
