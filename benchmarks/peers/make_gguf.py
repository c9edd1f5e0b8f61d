"""Write mixtures of experts, cut to some layers, as GGUF files with random weights: both sides read the same bytes.

    python -m benchmarks.peers.make_gguf NAME ... [--models DIR]

Blocks are of the format's own kind, with one scale for a whole tensor, such that weights have a standard deviation of
about 0.02. All matrices but the router (float32) are of the type that the name says, so that a token's bytes are
equal on both sides; in GPT-OSS attention, embeddings and head are Q8_0, as in the files that llama.cpp's authors
publish. There is no tokenizer: workloads are token ids.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

STRING, UINT32, FLOAT32 = 8, 4, 6
ALIGNMENT = 32
CHUNK_VALUES = 1 << 25


@dataclass(frozen=True)
class Kind:
    """A type of tensors: its number in the format, values and bytes of a block, and how a block begins."""

    number: int
    values: int
    num_bytes: int
    head: bytes


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


KINDS = {
    "F32": Kind(0, 1, 4, b""),
    "Q4_0": Kind(2, 32, 18, _half(0.0043)),
    "Q8_0": Kind(8, 32, 34, _half(0.00027)),
    "Q4_K": Kind(12, 256, 144, _half(0.00008) + _half(0.0006)),
    "MXFP4": Kind(39, 32, 17, bytes([120])),
}
"""head: the scale (Q4_K: of its scales and of its minima; MXFP4: the exponent); the rest of a block is random."""


@dataclass(frozen=True)
class Cut:
    """A model of `layers` layers. dense: type of the matrices outside the experts."""

    architecture: str
    experts: str
    dense: str
    layers: int
    vocabulary: int
    size: int
    heads: int
    kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    metadata: Mapping[str, Any]

    @property
    def has_biases(self) -> bool:
        return self.architecture == "gpt-oss"

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape with the outermost dimension first)."""
        yield "token_embd.weight", self.dense, (self.vocabulary, self.size)
        yield "output.weight", self.dense, (self.vocabulary, self.size)
        yield "output_norm.weight", "F32", (self.size,)
        for number in range(self.layers):
            for name, kind, shape in self._layer():
                yield f"blk.{number}.{name}", kind, shape

    def _layer(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attn_norm.weight", "F32", (self.size,)
        matrices = {"attn_q": (queries, self.size), "attn_k": (keys, self.size), "attn_v": (keys, self.size)}
        matrices["attn_output"] = (self.size, queries)
        experts = {"ffn_gate_exps": (self.expert_size, self.size), "ffn_up_exps": (self.expert_size, self.size)}
        experts["ffn_down_exps"] = (self.size, self.expert_size)
        for name, shape in matrices.items():
            yield f"{name}.weight", self.dense, shape
        yield "ffn_gate_inp.weight", "F32", (self.num_experts, self.size)
        for name, shape in experts.items():
            yield f"{name}.weight", self.experts, (self.num_experts, *shape)
        if not self.has_biases:
            yield "attn_q_norm.weight", "F32", (self.head_dim,)
            yield "attn_k_norm.weight", "F32", (self.head_dim,)
            yield "ffn_norm.weight", "F32", (self.size,)
            return
        yield "post_attention_norm.weight", "F32", (self.size,)
        yield "attn_sinks.weight", "F32", (self.heads,)
        yield "ffn_gate_inp.bias", "F32", (self.num_experts,)
        for name, shape in matrices.items():
            yield f"{name}.bias", "F32", shape[:1]
        for name, shape in experts.items():
            yield f"{name}.bias", "F32", (self.num_experts, shape[0])

    def header(self) -> dict[str, Any]:
        own = {
            "block_count": self.layers,
            "context_length": 32_768,
            "embedding_length": self.size,
            "feed_forward_length": self.expert_size,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "expert_count": self.num_experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.expert_size,
            "vocab_size": self.vocabulary,
            **self.metadata,
        }
        return {
            "general.architecture": self.architecture,
            **{f"{self.architecture}.{name}": value for name, value in own.items()},
            "tokenizer.ggml.model": "none",
        }


def _qwen(kind: str) -> Cut:
    return Cut("qwen3moe", kind, kind, 8, 151_936, 2_048, 32, 4, 128, 128, 8, 768, {"rope.freq_base": 1e6})


_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4_096}
FILES = {
    "qwen3-30b-a3b-8l-q4_0": _qwen("Q4_0"),
    "qwen3-30b-a3b-8l-q4_k": _qwen("Q4_K"),
    "gpt-oss-20b-6l-mxfp4": Cut(
        "gpt-oss", "MXFP4", "Q8_0", 6, 201_088, 2_880, 64, 8, 64, 32, 4, 2_880,
        {"rope.freq_base": 150_000.0, "attention.sliding_window": 128, **_YARN},
    ),
}  # fmt: skip
"""Qwen3-30B-A3B cut to 8 of its 48 layers, GPT-OSS-20B to 6 of its 24."""


def num_bytes(kind: Kind, shape: tuple[int, ...]) -> int:
    values = 1
    for size in shape:
        values *= size
    return values // kind.values * kind.num_bytes


def write(cut: Cut, path: Path) -> None:
    """Replace `path` when all of it is written."""
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    tensors = list(cut.tensors())
    with part.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(cut.header())))
        for key, value in cut.header().items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, kind, shape in tensors:
            file.write(_string(name) + struct.pack("<I", len(shape)))
            file.write(b"".join(struct.pack("<Q", size) for size in reversed(shape)))
            file.write(struct.pack("<IQ", KINDS[kind].number, offset))
            offset += _padded(num_bytes(KINDS[kind], shape))
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for name, kind, shape in tensors:
            _write_tensor(file, name, KINDS[kind], shape, random)
            file.write(bytes(_padded(file.tell()) - file.tell()))
    part.replace(path)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


def _write_tensor(file: BinaryIO, name: str, kind: Kind, shape: tuple[int, ...], random: np.random.Generator) -> None:
    if not kind.head:
        is_norm = name.endswith("norm.weight")
        file.write((np.ones(shape) if is_norm else random.normal(0, 0.02, shape)).astype(np.float32).tobytes())
        return
    num_blocks = num_bytes(kind, shape) // kind.num_bytes
    step = CHUNK_VALUES // kind.values
    for first in range(0, num_blocks, step):
        blocks = random.integers(0, 256, (min(step, num_blocks - first), kind.num_bytes), np.uint8)
        blocks[:, : len(kind.head)] = np.frombuffer(kind.head, np.uint8)
        file.write(blocks.tobytes())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<II", UINT32, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=FILES, metavar="NAME", help=", ".join(FILES))
    parser.add_argument("--models", type=Path, default=Path(__file__).parent / ".models", help="folder to write into")
    arguments = parser.parse_args()
    for name in arguments.names:
        write(FILES[name], arguments.models / f"{name}.gguf")


if __name__ == "__main__":
    main()
