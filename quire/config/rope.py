"""Rotary position embeddings in config.json, in the style of Transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`). `layers/rotary.py` computes their frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_POSITIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_STRETCHING = ("linear", "dynamic", "yarn")
_OF_TRAINED_LENGTH = ("llama3", "yarn", "longrope")
"""Types that use the model's trained length."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Keys of settings that differ by layer."""


@dataclass(frozen=True)
class RopeDefaults:
    """Family's RoPE settings where config.json has none. theta: base. share: rotated part of each head. turns_part:
    config.json may set another part. local_theta: base of windowed layers (None: all rotate alike). local_key: key of
    that base. skips_rotation: `no_rope_layers` or `no_rope_layer_interval` names layers without rotation. types:
    supported types. renamed: other names of types. is_stretched: `max_position_embeddings` counts stretched positions.
    mrope_section: see RopeConfig. mrope_interleaved: always on."""

    theta: float = 10_000.0
    share: float = 1.0
    turns_part: bool = False
    local_theta: float | None = None
    local_key: str = ""
    skips_rotation: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = ROPE_TYPES
    renamed: Mapping[str, str] = field(default_factory=dict)
    is_stretched: bool = False
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def rotated_layers(self, config: Fields, num_layers: int) -> tuple[bool, ...]:
        """True for each layer with rotary positions. Raises ModelLoadError for an incomplete list."""
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
    """Settings of rotary positions. rotary_dim: rotated leading elements of a head (even).
    original_max_position_embeddings: trained length in tokens. attention_factor: factor of cos and sin; None: the
    scaling's usual. mrope_section: elements that turn by a token's time, row and column (empty: all by its position),
    in turns if mrope_interleaved. Other fields belong to one `rope_type` each, under Transformers' names."""

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
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @property
    def longest(self) -> int:
        """Positions that the scaling supports at most."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * (self.factor or 1.0))
        if self.rope_type == "yarn":
            stretched = int(self.original_max_position_embeddings * (self.factor or 1.0))
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def usual_length(self) -> int:
        """Default of `max_model_len`. Dynamic scaling changes results only beyond the trained length, so longer
        contexts must be requested."""
        return self.max_position_embeddings if self.rope_type == "dynamic" else self.longest


def read_rope(config: Fields, head_dim: int, defaults: RopeDefaults, kind: str = FULL) -> RopeConfig:
    """Settings for layers of a kind, FULL or SLIDING, read as in Transformers. Raises ModelLoadError for an unknown
    type or a missing or absurd value."""
    raw, is_nested = _settings(config, defaults, kind)
    rope = Fields(raw, f"{config.where} (RoPE settings)")
    max_positions = config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    named = next((rope.text(key) for key in ("rope_type", "type") if key in raw), "default")
    rope_type = defaults.renamed.get(named, named)
    if rope_type not in defaults.types:
        raise rope.error(f"rope_type {shown(named)} is not supported (known: {', '.join(defaults.types)})")
    original = max_positions
    if rope_type in _OF_TRAINED_LENGTH:
        original = rope.integer("original_max_position_embeddings", max_positions, maximum=MAX_POSITIONS)
        if not is_nested:  # a value beside the settings has priority
            original = config.integer("original_max_position_embeddings", original, maximum=MAX_POSITIONS)
    is_longrope, is_llama3 = rope_type == "longrope", rope_type == "llama3"
    if rope_type == "yarn" and "factor" not in raw:
        raise rope.error("the key 'factor' is missing (rope_type 'yarn')")
    factor = rope.number("factor") if rope_type in ("linear", "dynamic", "llama3") else rope.optional_number("factor")
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = max_positions / original
    if factor is not None and rope_type in _STRETCHING and max(max_positions, original) * factor > MAX_POSITIONS:
        raise rope.error(f"factor {factor:g} stretches the model to more than {MAX_POSITIONS} positions")
    rotary_dim = _rotary_dim(config, rope, head_dim, defaults, rope_type)
    outer = Fields(_nested_in(config), rope.where) if is_nested else rope
    return RopeConfig(
        rope_type=rope_type,
        theta=rope.number("rope_theta"),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_positions,
        original_max_position_embeddings=original,
        factor=factor,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=outer.boolean("truncate", True),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        low_freq_factor=rope.number("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if is_llama3 else 1.0,
        short_factor=rope.numbers("short_factor", rotary_dim // 2) if is_longrope else (),
        long_factor=rope.numbers("long_factor", rotary_dim // 2) if is_longrope else (),
        mrope_section=_mrope_section(rope, rotary_dim, defaults),
        mrope_interleaved=_mrope_interleaved(rope, defaults),
    )


def read_layer_ropes(
    config: Fields, head_dim: int, defaults: RopeDefaults, windows: Sequence[int | None]
) -> tuple[RopeConfig | None, ...]:
    """Rotation of each layer. windows: window of each layer; None: full attention."""
    by_kind = {kind: read_rope(config, head_dim, defaults, kind) for kind in (FULL, SLIDING)}
    ropes = [by_kind[FULL if window is None else SLIDING] for window in windows]
    if not defaults.skips_rotation:
        return tuple(ropes)
    turned = defaults.rotated_layers(config, len(ropes))
    return tuple(rope if is_turned else None for rope, is_turned in zip(ropes, turned, strict=True))


def read_lengths(
    config: Fields, head_dim: int, defaults: RopeDefaults, windows: Sequence[int | None]
) -> tuple[int, int]:
    """(most positions that the rotations support, default of `max_model_len`). Layers without a window decide, if there
    are any."""
    kinds = [kind for kind in (FULL, SLIDING) if any((window is None) == (kind == FULL) for window in windows)]
    ropes = [read_rope(config, head_dim, defaults, kind) for kind in kinds]
    usual = [ropes[0].usual_length, *(rope.usual_length for rope in ropes[1:] if rope.rope_type == "dynamic")]
    if defaults.is_stretched:
        return ropes[0].max_position_embeddings, ropes[0].max_position_embeddings
    return ropes[0].longest, min(usual)


def _mrope_interleaved(rope: Fields, defaults: RopeDefaults) -> bool:
    return defaults.mrope_interleaved or rope.boolean("mrope_interleaved", False)


def _mrope_section(rope: Fields, rotary_dim: int, defaults: RopeDefaults) -> tuple[int, ...]:
    section = rope.values.get("mrope_section")
    if section is None:
        return defaults.mrope_section
    is_list = (
        isinstance(section, list) and len(section) == 3 and all(type(each) is int and each >= 0 for each in section)
    )
    if not is_list or (2 * sum(section) != rotary_dim and not _mrope_interleaved(rope, defaults)):
        raise rope.error(f"mrope_section must be three numbers of elements, {rotary_dim // 2} together")
    return tuple(section)


def _settings(config: Fields, defaults: RopeDefaults, kind: str) -> tuple[Mapping[str, Any], bool]:
    """(RoPE settings of a kind of layers, with their base; True if config.json nests them by kind)."""
    theta = config.number("rope_theta") if "rope_theta" in config.values else defaults.theta
    scaling = _object(config, "rope_scaling")
    if defaults.local_theta is None:
        raw = scaling or _nested_in(config) or defaults.settings
        if any(isinstance(value, dict) for value in raw.values()):
            raise config.error("RoPE settings that differ by layer are not supported for this family")
        return {"rope_theta": theta, **raw}, False
    nested = _nested_in(config)
    if scaling and config.values.get("rope_parameters") is not None and not nested.get(FULL):
        raise config.error(f"rope_scaling is not supported beside rope_parameters without {FULL}")
    own = {"rope_type": "default"} if nested.get(kind) is None else nested[kind]
    if not isinstance(own, dict):
        raise config.error(f"the RoPE settings of {kind} must be an object, not {shown(own)}")
    if kind == FULL:
        return {"rope_theta": theta, **own, **scaling}, True
    local = config.number(defaults.local_key, defaults.local_theta) if defaults.local_key else defaults.local_theta
    return {"rope_theta": local, **own}, True


def _nested_in(config: Fields) -> Mapping[str, Any]:
    return _object(config, "rope_parameters")


def _object(config: Fields, key: str) -> Mapping[str, Any]:
    raw = config.values.get(key) or {}
    if not isinstance(raw, dict):
        raise config.error(f"{key} must be an object, not {shown(raw)}")
    return raw


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, defaults: RopeDefaults, rope_type: str) -> int:
    share = config.number("partial_rotary_factor", defaults.share)
    share = rope.number("partial_rotary_factor", share)
    if not (defaults.turns_part or defaults.share != 1.0):
        if share != 1.0 and rope_type != "default":
            raise config.error(f"partial_rotary_factor {share:g} is not supported beside rope_type {rope_type!r}")
        share = 1.0
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise config.error(
            f"partial_rotary_factor {share:g} of head_dim {head_dim} must leave an even number of at least 2 "
            "elements to rotate"
        )
    return rotary_dim
