"""Rotary position embeddings as config.json describes them, in Transformers 4 style (`rope_theta`, `rope_scaling`)
and Transformers 5 style (`rope_parameters`). `layers/rotary.py` turns this into frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_POSITIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_STRETCHING = ("linear", "dynamic", "yarn")
_ALIASES = {"su": "longrope"}
FULL, SLIDING = "full_attention", "sliding_attention"
"""What settings that differ by layer are listed under."""


@dataclass(frozen=True)
class RopeDefaults:
    """What a family means by a config.json that leaves RoPE settings out.

    theta: the base; share: the rotated part of each head. local_theta: base of layers with a window, which then
    stretch nothing, where config.json has no settings for each kind of layer (None: all layers rotate alike);
    local_key: the key that has it. skips_rotation: `no_rope_layers` or `no_rope_layer_interval` say which layers are
    not rotated.
    """

    theta: float = 10_000.0
    share: float = 1.0
    local_theta: float | None = None
    local_key: str = "rope_theta"
    skips_rotation: bool = False

    def rotated_layers(self, config: Fields, num_layers: int) -> tuple[bool, ...]:
        """Which layers are rotated. Raises ModelLoadError for a list that does not say it of each."""
        if not self.skips_rotation:
            return (True,) * num_layers
        listed = config.values.get("no_rope_layers")
        if listed is None or listed == []:
            interval = config.integer("no_rope_layer_interval", 4)
            return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
        if not isinstance(listed, list) or len(listed) < num_layers or not all(each in (0, 1) for each in listed):
            raise config.error(f"no_rope_layers must have a 1 (rotated) or a 0 for each of the {num_layers} layers")
        return tuple(map(bool, listed[:num_layers]))


LLAMA_DEFAULTS = RopeDefaults()


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


def read_rope(config: Fields, head_dim: int, defaults: RopeDefaults = LLAMA_DEFAULTS, kind: str = FULL) -> RopeConfig:
    """Read config.json's RoPE settings for the layers of a kind, FULL or SLIDING. Raises ModelLoadError for an unknown
    type or a missing or absurd value."""
    raw = _settings(config, defaults, kind)
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
    rotary_dim = _rotary_dim(config, rope, head_dim, defaults.share)
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
        theta=rope.optional_number("rope_theta") or config.number("rope_theta", defaults.theta),
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


def read_layer_ropes(
    config: Fields, head_dim: int, defaults: RopeDefaults, windows: Sequence[int | None]
) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer, None for a layer without. windows: of the layers, None for full attention."""
    by_kind = {kind: read_rope(config, head_dim, defaults, kind) for kind in (FULL, SLIDING)}
    ropes = [by_kind[FULL if window is None else SLIDING] for window in windows]
    if not defaults.skips_rotation:
        return tuple(ropes)
    turned = defaults.rotated_layers(config, len(ropes))
    return tuple(rope if is_turned else None for rope, is_turned in zip(ropes, turned, strict=True))


def _settings(config: Fields, defaults: RopeDefaults, kind: str) -> Mapping[str, Any]:
    """The RoPE settings of the layers of a kind: one object for all, or one for each kind."""
    raw = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise config.error(f"the RoPE settings must be an object, not {shown(raw)}")
    if any(isinstance(value, dict) for value in raw.values()):
        if defaults.local_theta is None:
            raise config.error("RoPE settings that differ by layer are not supported for this family")
        raw = raw.get(kind) or {}
        if not isinstance(raw, dict):
            raise config.error(f"the RoPE settings of {kind} must be an object, not {shown(raw)}")
        return raw if kind == FULL else {"rope_theta": defaults.local_theta, **raw}
    if kind == SLIDING and defaults.local_theta is not None:
        return {"rope_theta": config.number(defaults.local_key, defaults.local_theta)}
    return raw


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, usual_share: float) -> int:
    share = rope.optional_number("partial_rotary_factor") or config.number("partial_rotary_factor", usual_share)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise config.error(
            f"partial_rotary_factor {share:g} of head_dim {head_dim} must leave an even number of at least 2 "
            "elements to rotate"
        )
    return rotary_dim
