"""Tiny random models that take images, as Transformers builds them, and what Transformers computes of images."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from quire.models.vision_grid import Grid
from tests.models.families import SMALL
from tests.models.harness import randomize, save
from tests.models.hybrid_families import EXPERTS, SIZES, SMALL_STATES

VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
ROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
PATCH_VALUES = 3 * 2 * 4 * 4
IMAGE_TOKEN = 90
"""Id of placeholders."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64, "longest_edge": 1600},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""What preprocessor_config.json says."""


def qwen3_vl(**vision: object) -> PreTrainedModel:
    text = {**SMALL, "head_dim": 16, "rope_parameters": ROPE}
    config = Qwen3VLConfig(text_config=text, vision_config={**VISION, **vision}, image_token_id=IMAGE_TOKEN)
    return Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> PreTrainedModel:
    text = {**SMALL, "head_dim": 16, "rope_parameters": ROPE, "moe_intermediate_size": 20, "num_experts": 4}
    text |= {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE_TOKEN)
    return Qwen3VLMoeForConditionalGeneration(config)


def qwen2_5_vl(**vision: object) -> PreTrainedModel:
    """Windows of 2 x 2 tokens."""
    plain = {
        name: value
        for name, value in VISION.items()
        if name not in ("num_position_embeddings", "deepstack_visual_indexes")
    }
    windows = {"fullatt_block_indexes": [1, 3], "window_size": 16, "num_heads": 3}
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config={**plain, **windows, **vision}, image_token_id=IMAGE_TOKEN
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def rotary_positions(
    model: PreTrainedModel,
    types: torch.Tensor,
    grids: dict[int, list[Grid]],
    intervals: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`get_rope_index` of Qwen2.5-VL as vLLM has it, and Transformers had it before 5.3: text continues behind the
    largest position, also of a video whose times outgrow its rows and columns. types: 0 text, 1 image, 2 video.
    intervals: rotary times between the parts of each video."""
    left, steps = {kind: iter(each) for kind, each in grids.items()}, iter(intervals)
    merge, found, start = model.config.vision_config.spatial_merge_size, [], 0
    for kind, group in itertools.groupby(types[0].tolist()):
        part = start + torch.arange(len(list(group))).expand(3, -1)
        if kind:
            grid, step = torch.tensor(next(left[kind])), next(steps) if kind == 2 else 1
            part = model.model.get_vision_position_ids(start, grid, 1, merge, step)
        found.append(part)
        start = int(part.max()) + 1
    positions = torch.cat(found, dim=1)
    return positions[:, None], torch.tensor([[start - positions.shape[1]]])


STATES_EPSILON = 1e-2
"""A state's first outputs are near zero, and their norm would enlarge rounding a thousand times."""


def qwen3_5(**vision: object) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    sections = {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    text = {**SIZES, **SMALL_STATES, "rope_parameters": rope | sections, "rms_norm_eps": STATES_EPSILON}
    plain = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
    config = Qwen3_5Config(text_config=text, vision_config={**plain, **vision}, image_token_id=IMAGE_TOKEN)
    return Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe() -> PreTrainedModel:
    values = qwen3_5().config.to_dict()
    text = {
        name: value for name, value in values["text_config"].items() if name not in ("intermediate_size", "model_type")
    }
    vision = {name: value for name, value in values["vision_config"].items() if name != "model_type"}
    config = Qwen3_5MoeConfig(text_config=text | EXPERTS, vision_config=vision, image_token_id=IMAGE_TOKEN)
    return Qwen3_5MoeForConditionalGeneration(config)


GEMMA_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""What preprocessor_config.json says beside `gemma3`."""
GEMMA_TOKENS = 16
"""Tokens of each image."""


def gemma3(query_pre_attn_scalar: int = 20, **vision: object) -> PreTrainedModel:
    """Sliding windows shorter and longer than an image, and a layer without."""
    rope = {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in ("sliding_attention", "full_attention")}
    text = {**SMALL, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": rope}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": query_pre_attn_scalar}
    tower = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower |= {"image_size": 32, "patch_size": 4, "model_type": "siglip_vision_model", **vision}
    tokens = {"mm_tokens_per_image": GEMMA_TOKENS, "image_token_id": IMAGE_TOKEN}
    tokens |= {"boi_token_index": IMAGE_START, "eoi_token_index": IMAGE_END}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower, **tokens))


def random_gemma3(**options: Any) -> PreTrainedModel:
    """With small embeddings, because their factor is large and they are the output projection: logits of any text would
    be the last token's."""
    model = randomize(gemma3(**options))
    model.get_input_embeddings().weight.data *= 0.1
    return model


BOUND = 1e-4
"""Largest difference of log-probabilities from Transformers'."""


def random_model(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Random weights by which rounding in float32 moves no log-probability by more than a tenth of BOUND, so that no
    processor's order of additions decides a test: at most 9e-6 of qwen3_5 and qwen3_5_moe, 4e-6 of the other families.
    `moved` measures it."""
    if build is gemma3:
        return random_gemma3()
    model = randomize(build())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "lm_head.weight":
                weight *= 0.5
            elif build in (qwen3_5, qwen3_5_moe) and "language_model" in name and name.endswith("norm.weight"):
                weight -= float("linear_attn" not in name)  # the others' factor is the weight plus 1
    return model


def moved(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """A copy whose weights differ by up to `size` times themselves. 2 ** -24 is float32's rounding."""
    found, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in found.parameters():
            weight *= 1 + size * torch.empty_like(weight).uniform_(-1, 1, generator=generator)
    return found


TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<s> <image> </s>{% else %}{{ part.text }}"
    "{% endif %} {% endfor %}{% endif %} {% endfor %}w8"
)
IMAGE_START, IMAGE_END = 80, 81
"""Ids of the tokens around an image."""


def save_chat(
    model: PreTrainedModel, path: Path, template: str = TEMPLATE, processor: dict[str, Any] = PROCESSOR
) -> Path:
    """A directory of the model with a tokenizer, whose words are w0, w1 and so on, and a template."""
    save(model, path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    words = {f"w{number}": number for number in range(97)}
    words |= {"<s>": IMAGE_START, "</s>": IMAGE_END, "<image>": IMAGE_TOKEN}
    numbers = {number: word for word, number in words.items()}
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in numbers.items()}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    )
    return path


def random_patches(grids: Sequence[Grid], seed: int = 0, values: int = PATCH_VALUES) -> torch.Tensor:
    """[patches, values] in the range of normalised pixels."""
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    return torch.empty(count, values).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


def expected_features(model: PreTrainedModel, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Of each image [tokens, feature size], those of the deep-stack layers beside the others."""
    with torch.inference_mode():
        found = model.model.get_image_features(patches, torch.tensor(grids), return_dict=True)
    deepstack = getattr(found, "deepstack_features", None) or ()
    return [torch.cat([main, *deep], dim=1) for main, *deep in zip(found.pooler_output, *deepstack, strict=True)]
