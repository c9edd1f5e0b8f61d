"""A tiny model on a small device, and short ways to run it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle

from quire.config.families import read_shape
from quire.config.model_shape import ModelShape
from quire.config.parallel import ParallelConfig
from quire.simulator.cost import CostModel
from quire.simulator.hardware import Hardware, find
from quire.simulator.replica import EngineSettings, Observer, Record, simulate
from quire.simulator.trace import TraceRequest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
SETTINGS = EngineSettings(
    block_size=16, num_blocks_override=200, max_num_seqs=16, max_num_batched_tokens=256, queue_depth=1
)


def shape(**changes: object) -> ModelShape:
    return read_shape({**LLAMA, **changes}, "tiny")


def with_attention(shape: ModelShape, windows: Sequence[int | None] = (None,), **changes: int) -> ModelShape:
    """The same shape with these windows, layer by layer and over again, and other numbers in its attention."""
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, kind="full" if window is None else "sliding", window=window, **changes),
        )
        for layer, window in zip(shape.layers, cycle(windows), strict=False)
    ]
    return replace(shape, layers=tuple(layers))


def make_cost(gpu: str | Hardware = "a100-40g", layout: ParallelConfig | None = None, **changes: object) -> CostModel:
    return CostModel(shape(**changes), find(gpu) if isinstance(gpu, str) else gpu, layout)


def settings(**changes: object) -> EngineSettings:
    return replace(SETTINGS, **changes)


def records(
    requests: Iterable[TraceRequest], cost: CostModel | None = None, options: EngineSettings = SETTINGS
) -> list[Record]:
    """What became of each request that finished, in the order of their ends."""
    found: list[Record] = []
    simulate(requests, cost or make_cost(), options, observer=Observer(on_record=found.append))
    return found
