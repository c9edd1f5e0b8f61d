from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.config.families import VISION_CONFIG
from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.config.parallel import ParallelConfig

ROTATED_PARTS = 4
"""Elements of a head that one frequency turns: two for a patch's row, two for its column."""
MAX_PATCH = 256
"""Limit of a patch's side in pixels, and of its frames."""
IMAGE_TOKENS = "mm_tokens_per_image"
"""Key of config.json: tokens of a picture."""
IMAGE_MARKS = ("boi_token_index", "eoi_token_index")
"""Keys of config.json: tokens before and after a picture's."""
VIDEO_TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Keys of config.json: placeholder of videos, and the tokens before and after each part's."""
OUTER_KEYS = (IMAGE_TOKENS, *IMAGE_MARKS, *VIDEO_TOKENS)
"""Keys of config.json that count as the vision tower's."""
CACHE_BYTES = 256 * 2**20
"""Bytes of image features that workers keep for later steps and requests."""


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of a vision tower. merge_size: patches on each side of the square that becomes one token. output_size:
    elements of a token's features. table_side: rows and columns of the table of learned positions (0: none).
    deepstack_layers: ascending layers whose outputs the language model adds after its first layers. is_gated: MLPs have
    three matrices, norms are RMS norms. window: tokens on each side of the squares in which patches attend to one
    another (0: their whole frame), except in `whole_layers`. is_pooled: a token's features are the mean of its patches;
    all pictures have table_side ** 2 patches, whose tokens see one another. marks: tokens around an image's (None: the
    chat template writes them). tokens_per_second: rotary times of a second of video (None: a time is text)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    frames: int
    patch_size: int
    merge_size: int
    output_size: int
    table_side: int
    deepstack_layers: tuple[int, ...]
    activation: str
    rope_theta: float
    is_gated: bool = False
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    is_pooled: bool = False
    epsilon: float = 1e-6
    marks: tuple[int, int] | None = None
    tokens_per_second: float | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def image_tokens(self) -> int:
        return (self.table_side // self.merge_size) ** 2

    @property
    def patch_values(self) -> int:
        return self.channels * self.frames * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Elements of the hidden states of a token's patches, or of their mean."""
        return self.hidden_size * (1 if self.is_pooled else self.merge_size**2)

    @property
    def feature_size(self) -> int:
        """Elements of all features of a token: its embedding's replacement, then those of each deep-stack layer."""
        return self.output_size * (1 + len(self.deepstack_layers))

    @property
    def entrance_layers(self) -> int:
        """First language layers that a pipeline's first stage has, since features are added behind them."""
        return max(1, len(self.deepstack_layers))

    @property
    def num_elements(self) -> int:
        """Number of the tower's parameters."""
        size, merged, output = self.hidden_size, self.merged_size, self.output_size
        norm = 1 if self.is_gated else 2
        layer = 2 * norm * size + 4 * (size + 1) * size
        mlp = self.intermediate_size
        layer += 3 * size * mlp + 2 * mlp + size if self.is_gated else 2 * size * mlp + mlp + size
        found = self.num_layers * layer + self.patch_values * size + self.table_side**2 * size
        found += size if self.table_side else 0
        if self.is_pooled:
            return found + 2 * size + size + size * output
        merger = (merged + 1) * merged + (merged + 1) * output
        return found + merger + norm * size + len(self.deepstack_layers) * (merger + norm * merged)

    def working_bytes(self, tokens: int) -> int:
        """Upper estimate in bytes of kept features and working memory for an image of `tokens`."""
        patches = tokens * self.merge_size**2
        per_patch = 10 * self.hidden_size + self.intermediate_size + self.patch_values + self.merged_size
        return CACHE_BYTES + 4 * (2 * patches * per_patch + tokens * self.feature_size)


@dataclass(frozen=True)
class EncoderCosts:
    """Costs of a vision tower, by which the scheduler shares out steps. num_layers: layers, which can be computed one
    at a time. cache_tokens: image tokens whose features are kept; a larger image is kept alone. patch_factor,
    pair_factor: elements that a layer multiplies for each patch, and for each pair of patches that attend to one
    another, relative to a text token's in all layers. patches: patches of a token. window: patches of a window.
    whole_share: share of the layers that attend to whole frames. num_ranks: ranks that have the whole tower, each for
    images of its own."""

    num_layers: int
    cache_tokens: int
    patch_factor: float
    pair_factor: float
    patches: int
    window: int = 0
    whole_share: float = 1.0
    num_ranks: int = 1

    @classmethod
    def of(cls, config: VisionConfig, text_elements: int, layout: ParallelConfig | None = None) -> EncoderCosts:
        """Costs of `config`'s tower, on the first stage. text_elements: elements that a text token is multiplied by on
        all ranks together."""
        num_ranks, num_stages = (1, 1) if layout is None else (layout.tp, layout.pp)
        size, text_elements = config.hidden_size, text_elements // (num_ranks * num_stages)
        return cls(
            num_layers=config.num_layers,
            cache_tokens=CACHE_BYTES // (4 * config.feature_size),
            patch_factor=(4 * size + (3 if config.is_gated else 2) * config.intermediate_size) * size / text_elements,
            pair_factor=2 * size / text_elements,
            patches=config.merge_size**2,
            window=(config.window * config.merge_size) ** 2,
            whole_share=len(config.whole_layers) / config.num_layers if config.window else 1.0,
            num_ranks=num_ranks,
        )

    def layer_tokens(self, grid: tuple[int, int, int]) -> int:
        """Text tokens that cost about as much as one layer for an image."""
        frames, rows, columns = grid
        of_frame = rows * columns * self.patches
        seen = self.whole_share * of_frame + (1 - self.whole_share) * min(self.window, of_frame)
        return math.ceil(frames * of_frame * (self.patch_factor + seen * self.pair_factor))


def with_entrance(model: ModelConfig, pp: int) -> ModelConfig:
    """`model` whose layers with deep-stack features are the first stage's of `pp`. Raises ConfigError for too many
    stages."""
    if model.vision is None or model.architecture not in VISION_TOWERS:
        return model
    count = _vision_of(model).entrance_layers
    shape = replace(model.shape, entrance_layers=count)
    if pp > shape.most_stages:
        raise ConfigError(
            f"pipeline_parallel_size={pp} is not possible: the model's first {count} of {model.num_layers} layers add "
            "an image's features, and the first stage has them all; with language_model_only it takes text alone",
            param="pipeline_parallel_size",
        )
    return replace(model, shape=shape)


def _vision_of(model: ModelConfig) -> VisionConfig:
    assert model.vision is not None, "the model has a tower"
    return read_vision(model.architecture, model.vision, model.hidden_size, str(model.path / "config.json"))


def check_whole_images(config: EngineConfig) -> None:
    """Raise ConfigError for limits of a step under which a whole image would never be computed."""
    model, scheduler = config.model, config.scheduler
    kind = VISION_TOWERS.get(model.architecture)
    if model.vision is None or kind is None or not kind.is_pooled or config.media.language_model_only:
        return
    vision = _vision_of(model)
    tokens, beside = vision.image_tokens, (scheduler.max_num_seqs - 1) * (1 + config.speculation.max_drafts)
    if scheduler.max_num_batched_tokens < tokens + beside:
        raise ConfigError(
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at least {tokens + beside}: an image "
            f"of this model has {tokens} tokens, which one step computes, beside up to {beside} of other sequences "
            "(max_num_seqs)",
            param="max_num_batched_tokens",
        )
    if scheduler.max_prefill_chunk is not None and scheduler.max_prefill_chunk < tokens:
        raise ConfigError(
            f"max_prefill_chunk ({scheduler.max_prefill_chunk}) must be at least the {tokens} tokens of an image, "
            "which one step computes",
            param="max_prefill_chunk",
        )


def read_vision(architecture: str, values: Mapping[str, Any], hidden_size: int, where: str) -> VisionConfig:
    """Read a tower's sizes. architecture: name in VISION_TOWERS. hidden_size: language model's. Raises
    ModelLoadError with the key that is missing, wrong or not supported."""
    fields = Fields(values, f"{where}: {VISION_CONFIG}")
    kind = VISION_TOWERS[architecture]
    if kind.is_pooled:
        return _read_pooled(fields, hidden_size)
    num_layers = fields.integer("depth", kind.depth, maximum=MAX_LAYERS)
    size = fields.integer("hidden_size", kind.hidden_size, maximum=MAX_WIDTH)
    heads = fields.integer("num_heads", 16, maximum=MAX_HEADS)
    if size % heads or size // heads % ROTATED_PARTS or size // heads > MAX_HEAD_DIM:
        raise fields.error(
            f"hidden_size ({size}) must be num_heads ({heads}) times a multiple of {ROTATED_PARTS}, at most "
            f"{MAX_HEAD_DIM}"
        )
    output = fields.integer("out_hidden_size", 3584, maximum=MAX_WIDTH)
    if output != hidden_size:
        raise fields.error(f"out_hidden_size ({output}) must be the language model's hidden_size ({hidden_size})")
    config = VisionConfig(
        num_layers=num_layers,
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size", kind.intermediate_size, maximum=MAX_WIDTH),
        num_heads=heads,
        channels=_three_channels(fields),
        frames=fields.integer("temporal_patch_size", 2, maximum=MAX_PATCH),
        patch_size=fields.integer("patch_size", kind.patch_size, maximum=MAX_PATCH),
        merge_size=fields.integer("spatial_merge_size", 2, maximum=MAX_PATCH),
        output_size=output,
        table_side=0 if kind.has_windows else _table_side(fields),
        deepstack_layers=_layers(fields, "deepstack_visual_indexes", kind.deepstack, num_layers),
        activation=fields.text("hidden_act", kind.activation),
        rope_theta=_rope_theta(fields),
    )
    if not kind.has_windows:
        return config
    side = fields.integer("window_size", 112, maximum=MAX_WIDTH) // config.merge_size // config.patch_size
    if not side:
        raise fields.error("window_size must be the pixels of a token at least")
    whole = _layers(fields, "fullatt_block_indexes", (7, 15, 23, 31), num_layers)
    rate = fields.number("tokens_per_second", 4.0)
    return replace(config, is_gated=True, window=side, whole_layers=whole, tokens_per_second=rate)


@dataclass(frozen=True)
class TowerKind:
    """Reader and default sizes for one family of vision towers."""

    deepstack: tuple[int, ...] | None = None
    """Default layers with further features; None: no layer has any."""
    has_windows: bool = False
    is_pooled: bool = False
    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    patch_size: int = 16
    activation: str = "gelu_pytorch_tanh"


_QWEN3, _QWEN35 = TowerKind(deepstack=(8, 16, 24)), TowerKind()
VISION_TOWERS: Mapping[str, TowerKind] = MappingProxyType(
    {
        "Qwen3VLForCausalLM": _QWEN3,
        "Qwen3VLMoeForCausalLM": _QWEN3,
        "Qwen3_5ForCausalLM": _QWEN35,
        "Qwen3_5MoeForCausalLM": _QWEN35,
        "Qwen2_5_VLForCausalLM": TowerKind(
            has_windows=True, depth=32, hidden_size=3584, intermediate_size=3420, patch_size=14, activation="silu"
        ),
        "Gemma3ForCausalLM": TowerKind(is_pooled=True),
    }
)
"""Language models with supported vision towers."""


def _read_pooled(fields: Fields, hidden_size: int) -> VisionConfig:
    size = fields.integer("hidden_size", 768, maximum=MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 12, maximum=MAX_HEADS)
    if size % heads or size // heads % 2 or size // heads > MAX_HEAD_DIM:
        raise fields.error(
            f"hidden_size ({size}) must be num_attention_heads ({heads}) times an even number, at most {MAX_HEAD_DIM}"
        )
    patch = fields.integer("patch_size", 16, maximum=MAX_PATCH)
    side = fields.integer("image_size", 224, maximum=MAX_WIDTH) // patch
    tokens = fields.integer(IMAGE_TOKENS, 256, maximum=MAX_WIDTH)
    tokens_side = math.isqrt(tokens)
    if tokens_side**2 != tokens or side % tokens_side:
        raise fields.error(
            f"{IMAGE_TOKENS} ({tokens}) must be the square of a divisor of the {side} patches on a side of an image"
        )
    begin, end = (
        fields.integer(key, usual, minimum=0) for key, usual in zip(IMAGE_MARKS, (255_999, 256_000), strict=True)
    )
    return VisionConfig(
        num_layers=fields.integer("num_hidden_layers", 12, maximum=MAX_LAYERS),
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size", 3072, maximum=MAX_WIDTH),
        num_heads=heads,
        channels=_three_channels(fields, "num_channels"),
        frames=1,
        patch_size=patch,
        merge_size=side // tokens_side,
        output_size=hidden_size,
        table_side=side,
        deepstack_layers=(),
        activation=fields.text("hidden_act", "gelu_pytorch_tanh"),
        rope_theta=0.0,
        is_pooled=True,
        marks=(begin, end),
        epsilon=fields.number("layer_norm_eps", 1e-6),
    )


def _table_side(fields: Fields) -> int:
    positions = fields.integer("num_position_embeddings", 2304, maximum=MAX_WIDTH)
    side = math.isqrt(positions)
    if side * side != positions:
        raise fields.error(f"num_position_embeddings must be the square of a number, not {positions}")
    return side


def _three_channels(fields: Fields, usual: str = "in_channels") -> int:
    key = "in_chans" if "in_chans" in fields.values else usual
    channels = fields.integer(key, 3)
    if channels != 3:
        raise fields.error(f"{key} must be 3, red, green and blue, not {channels}")
    return channels


def _layers(fields: Fields, key: str, usual: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Layers that a list names. usual: default of the list; None: the key is not read."""
    listed = () if usual is None else fields.values.get(key, usual)
    is_list = isinstance(listed, list | tuple) and all(type(layer) is int for layer in listed)
    if not is_list or sorted(set(listed)) != list(listed) or not all(0 <= layer < num_layers for layer in listed):
        raise fields.error(f"{key} must name layers of the {num_layers} in ascending order, not {shown(listed)}")
    return tuple(listed)


def _rope_theta(fields: Fields) -> float:
    settings = fields.values.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise fields.error(f"rope_parameters must be an object, not {shown(settings)}")
    rope = Fields(settings, f"{fields.where}: rope_parameters")
    rope.choice("rope_type", ("axial",), "axial")
    return rope.number("rope_theta", 10_000.0)
