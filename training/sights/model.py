"""Sizes of the model, its tokenizer, and the files of a checkpoint beside its weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from scenes import COLOURS, QUESTIONS, SHAPES, question, scene
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

VOCABULARY = 512
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL_TOKENS))
PATCH, MERGE = 8, 2
PIXELS = 64 * 64
SYSTEM = "You are a helpful assistant."

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": PIXELS * 9 // 10, "longest_edge": PIXELS * 11 // 10},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END,
    "pad_token_id": END_OF_TEXT,
}
VISION = {
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1],
}


def new_model() -> Qwen3VLForConditionalGeneration:
    """A model with random weights."""
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def new_tokenizer() -> Tokenizer:
    """A byte-level BPE of the questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def write_files(directory: Path, tokenizer: Tokenizer) -> None:
    """Everything of a checkpoint but its weights and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "chat_template": template,
        "model_max_length": TEXT["max_position_embeddings"],
    }
    for name, values in {
        "tokenizer_config.json": settings,
        "preprocessor_config.json": PROCESSOR,
        "generation_config.json": {"eos_token_id": [END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False},
    }.items():
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")


def _texts() -> Iterator[str]:
    """Texts to make words of. All words get into the vocabulary, with and without a space and a capital."""
    rng = random.Random(0)
    yield "user\nassistant\nsystem\n" * 9
    for words in (COLOURS, SHAPES, [f"{shape}s" for shape in SHAPES]):
        yield from (f"{word} {word} {word.capitalize()} {word.capitalize()}" for word in words for _ in range(20))
    for _ in range(3000):
        for kind, answer in scene(rng, rng.choice(("one", "two", "many", "digit", "nothing")), (8, 8)).questions():
            yield question(kind, rng) + "\n" + answer
    yield from (form for forms in QUESTIONS.values() for form in forms for _ in range(20))
    yield SYSTEM * 9
