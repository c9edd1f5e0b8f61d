"""Write models of real shapes with random weights: what every engine of a comparison loads.

    python benchmarks/peers/make_models.py [NAME ...] [--models DIR]

Needs torch and transformers (`pip install -e '.[test]'`). The weights are bfloat16 and the same at each run of the same
versions. The tokenizer is one only in form: workloads are token ids, but some converters refuse a model without one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

PAD, EOS = "<|endoftext|>", "<|im_end|>"


def _qwen3(*, hidden_size: int, intermediate_size: int) -> Qwen3Config:
    """The sizes in which the smallest models of the family differ."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rope_theta=1e5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    ),
    "qwen3-0.6b": _qwen3(hidden_size=1_024, intermediate_size=3_072),
    "qwen3-1.7b": _qwen3(hidden_size=2_048, intermediate_size=6_144),
    "opt-125m": OPTConfig(bos_token_id=1, eos_token_id=1, pad_token_id=0),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes and the pairs of lower-case letters: no training, the same everywhere."""
    letters = string.ascii_lowercase
    merges = list(itertools.product(letters, letters))
    tokens = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, bos_token=None)


def make_model(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters", {})
    if "rope_theta" in rope:  # where readers look that are older than Transformers 5
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": rope["rope_theta"]}, indent=2) + "\n")
    byte_tokenizer().save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--models", type=Path, default=Path(__file__).parent / ".models", help="folder to write into")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - MODELS.keys():
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    for name in arguments.names or MODELS:
        make_model(name, arguments.models / name)


if __name__ == "__main__":
    main()
