"""Write a checkpoint as a Hugging Face model directory that ``LlamaForCausalLM`` reads."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from checkpoint import load_model
from model import LanguageModel
from safetensors.torch import save
from tokenizers import Tokenizer
from train_tokenizer import END_OF_TEXT, write_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def hugging_face_config(model: LanguageModel, separator: int, dtype: str) -> dict[str, object]:
    """The content of ``config.json``."""
    config = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": separator,
        "pretraining_tp": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def export(checkpoint: Path, tokenizer_directory: Path, output: Path, dtype: str) -> None:
    """Write the model of ``checkpoint`` and the tokenizer to the directory ``output``."""
    model = load_model(checkpoint)
    output.mkdir(parents=True, exist_ok=True)
    if tokenizer_directory.resolve() != output.resolve():
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_directory / name, output / name)
    separator = Tokenizer.from_file(str(output / "tokenizer.json")).token_to_id(END_OF_TEXT)
    write_json(output / "config.json", hugging_face_config(model, separator, dtype))
    write_json(
        output / "generation_config.json",
        {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": separator},
    )
    weights = {f"model.{name}": tensor.to(DTYPES[dtype]).contiguous() for name, tensor in model.state_dict().items()}
    partial = output / "model.safetensors.partial"
    partial.write_bytes(save(weights, metadata={"format": "pt"}))
    os.replace(partial, output / "model.safetensors")  # a reader sees the old file or the new one
    print(f"{model.parameter_count()} parameters written to {output}")


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="directory of the tokenizer (default: the output)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.tokenizer or arguments.output, arguments.output, arguments.dtype)


if __name__ == "__main__":
    main()
