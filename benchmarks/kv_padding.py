"""How much of the KV blocks of published models no layer can use.

    python -m benchmarks.kv_padding [--block-size 16]

For each model: the layers of a group, the groups of each kind with their block sizes and pages, and the padding of one
sequence at several lengths. The layers follow the models' config.json; keys, values and latents are stored in bfloat16,
and recurrent states in float32 beside convolution states in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from quire.kv_cache.coordinator import padding
from quire.kv_cache.layout import block_bytes, group_layers
from quire.kv_cache.spec import AttentionSpec, LatentSpec, LayerSpec, SlidingWindowSpec, StateSpec
from quire.utils.sizes import format_bytes

LENGTHS = (1, 1024, 8192, 131_072)
BFLOAT16, FLOAT32 = 2, 4
SNAPSHOT_INTERVAL = 1024


def full(num_kv_heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_kv_heads, head_dim, head_dim, BFLOAT16)


def sliding(num_kv_heads: int, head_dim: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(num_kv_heads, head_dim, head_dim, BFLOAT16, window=window)


def gated_delta(num_key_heads: int, num_value_heads: int, head_dim: int, kernel: int) -> StateSpec:
    """A gated delta network's state: a matrix per value head, and the last inputs of a short convolution over
    queries, keys and values."""
    channels = (2 * num_key_heads + num_value_heads) * head_dim
    num_bytes = channels * (kernel - 1) * BFLOAT16 + num_value_heads * head_dim * head_dim * FLOAT32
    return StateSpec(num_bytes, SNAPSHOT_INTERVAL)


def layers(count: int, usual: LayerSpec, other: LayerSpec, is_other: Callable[[int], bool]) -> list[LayerSpec]:
    """is_other: of a layer's number, from 1."""
    return [other if is_other(number) else usual for number in range(1, count + 1)]


def every(period: int) -> Callable[[int], bool]:
    return lambda number: number % period == 0


MODELS: Mapping[str, Sequence[LayerSpec]] = {
    "gemma-2-2b": layers(26, sliding(4, 256, 4096), full(4, 256), every(2)),
    "gemma-2-9b": layers(42, sliding(8, 256, 4096), full(8, 256), every(2)),
    "gemma-2-27b": layers(46, sliding(16, 128, 4096), full(16, 128), every(2)),
    "gemma-3-1b": layers(26, sliding(1, 256, 512), full(1, 256), every(6)),
    "gemma-3-4b": layers(34, sliding(4, 256, 1024), full(4, 256), every(6)),
    "gemma-3-12b": layers(48, sliding(8, 256, 1024), full(8, 256), every(6)),
    "gemma-3-27b": layers(62, sliding(16, 128, 1024), full(16, 128), every(6)),
    "gpt-oss-20b": layers(24, sliding(8, 64, 128), full(8, 64), every(2)),
    "gpt-oss-120b": layers(36, sliding(8, 64, 128), full(8, 64), every(2)),
    "llama-4-scout": layers(48, sliding(8, 128, 8192), full(8, 128), every(4)),
    "llama-4-maverick": layers(48, sliding(8, 128, 8192), full(8, 128), every(4)),
    "qwen3-next-80b-a3b": layers(48, gated_delta(16, 32, 128, 4), full(2, 256), every(4)),
    "qwen3.5-27b": layers(64, gated_delta(16, 48, 128, 4), full(4, 256), every(4)),
    "qwen3.5-35b-a3b": layers(40, gated_delta(16, 32, 128, 4), full(2, 256), every(4)),
    "deepseek-v3": [LatentSpec(512 + 64, BFLOAT16)] * 61,
    "kimi-linear-48b-a3b": layers(
        27,
        gated_delta(32, 32, 128, 4),
        LatentSpec(512 + 64, BFLOAT16),
        lambda number: number in (4, 8, 12, 16, 20, 24, 27),
    ),
}


def padding_at(specs: Sequence[LayerSpec], num_tokens: int, block_size: int = 16) -> float:
    """The share of the blocks of one sequence that no layer can use."""
    groups, layers_per_group = group_layers(specs, block_size)
    return padding(groups, block_bytes(groups, layers_per_group), num_tokens)


def describe(specs: Sequence[LayerSpec], block_size: int) -> str:
    """The groups of each kind."""
    groups, _ = group_layers(specs, block_size)
    kinds: dict[str, list[str]] = {}
    for group in groups:
        kind = f"{group.spec.kind} of {group.block_size} tokens, {format_bytes(group.page_bytes)}"
        kinds.setdefault(kind, []).append(str(len(group.layers)))
    return "; ".join(f"{'+'.join(counts)} layers {kind}" for kind, counts in kinds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=16, help="tokens of the smallest block")
    block_size = parser.parse_args().block_size
    print(f"{'model':<20}" + "".join(f"{length:>10,}" for length in LENGTHS) + "  groups")
    for name, specs in MODELS.items():
        shares = "".join(f"{100 * padding_at(specs, length, block_size):>9.2f}%" for length in LENGTHS)
        print(f"{name:<20}{shares}  {describe(specs, block_size)}")


if __name__ == "__main__":
    main()
