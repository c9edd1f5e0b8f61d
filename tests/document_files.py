"""Files that the commands of the documents name: small models, an adapter, pictures, requests and traces.

They are written once, without torch, and linked into the directory of each document (tests/check_docs.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file

from tests.architecture.source import ROOT

BUNDLED = ROOT / "quire" / "bundled" / "quire-python-5m"
SIGHTS = ROOT / "quire" / "bundled" / "quire-sights-1m"
MODELS = ("MODEL", "SMALLER_MODEL", "path/to/model", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B")
"""Names of models in the documents; here each is a random LLaMA of two layers."""
QUANTIZED = ("path/to/directory", "org/model")
"""Names of models that `quire quantize` reads."""
SIZE = 64
"""Width of the random models, in features."""
Arrays = dict[str, NDArray[np.float32]]


def write_files(folder: Path) -> None:
    for name in MODELS:
        write_model(folder / name)
    for name in QUANTIZED:
        write_model(folder / name)
        split_words_as_gpt2(folder / name / "tokenizer.json")
    write_model(folder / "MODEL_OF_EXPERTS", num_experts=4)
    write_model(folder / "MODEL_OF_ONE_KEY_HEAD", num_key_value_heads=1)
    (folder / "Qwen/Qwen3-VL-8B-Instruct").symlink_to(SIGHTS)
    write_adapter(folder / "adapters" / "sql")
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("picture.png", "photo.png"):
        Image.new("RGB", (64, 64), "red").save(folder / name)
    (folder / "text.txt").write_text((ROOT / "quire" / "llm.py").read_text()[:8000])
    (folder / "path/to/config.json").write_text((BUNDLED / "config.json").read_text())
    body = {"model": "bundled", "prompt": "def f(", "max_tokens": 4}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = [{"prompt": "def f(", "max_tokens": 4}] * 4
    (folder / "workloads.json").write_text(json.dumps({"batch32": requests}))
    arrivals = [{"arrival": 0.1 * i, "input_tokens": 800, "output_tokens": 300} for i in range(300)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in arrivals))


def link_files(files: Path, folder: Path) -> None:
    """Give a document a directory of its own with these files, so that what its commands write stays there."""
    shutil.copytree(files, folder, symlinks=True, copy_function=os.link)
    for name in ("home/.config/fish/completions", "home/.zfunc"):
        (folder / name).mkdir(parents=True)


def split_words_as_gpt2(tokenizer: Path) -> None:
    """Give a tokenizer GPT-2's rule of splitting words, which has a name in GGUF files."""
    content = json.loads(tokenizer.read_text())
    split = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
    tokenizer.unlink()
    tokenizer.write_text(json.dumps({**content, "pre_tokenizer": split, "normalizer": None}))


def write_model(directory: Path, num_experts: int = 0, num_key_value_heads: int = 2) -> None:
    """Write a random LLaMA, or Mixtral, of two layers with the bundled model's tokenizer."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (directory / name).symlink_to(BUNDLED / name)
    own = json.loads((BUNDLED / "config.json").read_text())
    config = {
        **{name: own[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "rms_norm_eps", "hidden_act")},
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": num_key_value_heads,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
    }
    if num_experts:
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2}
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts}
    (directory / "config.json").write_text(json.dumps(config))
    random, keys = np.random.default_rng(1), SIZE // 4 * num_key_value_heads

    def matrix(rows: int) -> NDArray[np.float32]:
        return (random.standard_normal((rows, SIZE)) * SIZE**-0.5).astype(np.float32)

    tensors: Arrays = {"model.norm.weight": np.ones(SIZE, np.float32)}
    tensors |= {name: matrix(own["vocab_size"]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = np.ones(SIZE, np.float32)
        for name, rows in {"q": SIZE, "k": keys, "v": keys, "o": SIZE}.items():
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows)
        if num_experts:
            tensors[f"{layer}block_sparse_moe.gate.weight"] = matrix(num_experts)
            for expert in range(num_experts):
                for name in ("w1", "w2", "w3"):
                    tensors[f"{layer}block_sparse_moe.experts.{expert}.{name}.weight"] = matrix(SIZE)
        else:
            for name in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{layer}mlp.{name}.weight"] = matrix(SIZE)
    save_file(tensors, directory / "model.safetensors")


def write_adapter(directory: Path) -> None:
    """Write an adapter of the random models' queries."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(1)
    tensors: Arrays = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.standard_normal((8, SIZE)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.standard_normal((SIZE, 8)).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
