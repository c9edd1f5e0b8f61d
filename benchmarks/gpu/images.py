"""Pictures: python -m benchmarks.gpu.images --out FILE [--tiny]

One engine of Qwen3-VL-8B's shape and random weights. For prompts of one and of eight pictures of 1,024 x 1,024: seconds
until the first token, of a text with as many tokens, and their difference, which is the vision tower's, with its limit
(products and attention over the card's peak). --tiny: small sizes in Triton's interpreter, to try the script.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from benchmarks.gpu import records
from benchmarks.gpu.engine import greedy
from benchmarks.gpu.limits import measure_ceilings
from quire import LLM

ROUNDS = 3
START, PICTURE, END = 151652, 151655, 151653
"""Tokens before, in the place of, and behind a picture."""
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
    "model_type": "qwen3_vl",
}
TEXT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "model_type": "qwen3_vl_text",
}
TINY_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write(directory: Path, *, tiny: bool) -> dict[str, Any]:
    """Write a model directory for load_format="dummy"; returns the tower's configuration."""
    text, tower = dict(TEXT), dict(TOWER)
    if tiny:
        rope = {**TEXT["rope_parameters"], "mrope_section": [4, 2, 2]}
        text |= {**TINY_TEXT, "rope_parameters": rope}
        tower |= {**TINY_TOWER, "deepstack_visual_indexes": [0]}
    dtype = "float32" if tiny else "bfloat16"
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": tower,
        "image_token_id": PICTURE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 1024, "longest_edge": 1 << 24},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return tower


def tower_operations(tower: dict[str, Any], num_patches: int) -> float:
    """Multiplications and additions of one picture, without the merger."""
    size, inner = tower["hidden_size"], tower["intermediate_size"]
    products = 2.0 * num_patches * (4 * size * size + 2 * size * inner)
    return float(tower["depth"] * (products + 4.0 * num_patches * num_patches * size))


def picture(edge: int, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (edge, edge, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    tiny, emit = arguments.tiny, records.writer(arguments.out)
    edge, numbers = (64, (1,)) if tiny else (1024, (1, 8))
    sizes: dict[str, Any] = {"num_bytes": 1 << 16, "size": 64} if tiny else {}
    ceilings, _ = measure_ceilings(torch.device("cpu" if tiny else "cuda"), **sizes)
    where: dict[str, Any] = {"device": "cpu", "attention_backend": "triton"} if tiny else {"device": "cuda"}
    with tempfile.TemporaryDirectory() as directory:
        tower = write(Path(directory), tiny=tiny)
        num_patches = (edge // tower["patch_size"]) ** 2
        num_tokens = num_patches // tower["spatial_merge_size"] ** 2
        options = {"max_model_len": 256 if tiny else 16384, "max_num_batched_tokens": 256 if tiny else 16384}
        options |= {"limit_mm_per_prompt": {"image": max(numbers)}, "enable_prefix_caching": False}
        with LLM(directory, load_format="dummy", skip_tokenizer_init=True, **options, **where) as llm:
            for number in numbers:
                found: dict[str, list[float]] = {"pictures": [], "text": []}
                for turn in range(ROUNDS + 1):
                    images = [picture(edge, 100 * turn + place) for place in range(number)]
                    given = {
                        "pictures": {
                            "prompt_token_ids": [START, PICTURE, END] * number,
                            "multi_modal_data": {"image": images},
                        },
                        "text": {"prompt_token_ids": random.Random(turn).choices(range(1000), k=number * num_tokens)},
                    }
                    for kind, prompt in given.items():
                        began = time.perf_counter()
                        llm.generate([prompt], greedy(1), use_tqdm=False)
                        found[kind].append(time.perf_counter() - began)
                pictures, text = (median(seconds[1:]) for seconds in found.values())
                least = number * tower_operations(tower, num_patches) / ceilings.peak
                emit(
                    {
                        "part": "images",
                        "what": "pictures",
                        "number": number,
                        "edge": edge,
                        "tokens": number * num_tokens,
                        "seconds": pictures,
                        "text_seconds": text,
                        "tower_limit_seconds": least,
                    }
                )


if __name__ == "__main__":
    main()
