from __future__ import annotations

from typing import NamedTuple

from quire.config.model_shape import LayerShape, ModelShape
from quire.config.parallel import ParallelConfig
from quire.utils.sizes import format_bytes

ELEMENT_BYTES = 4
"""Size of an element that ranks on CPUs exchange."""


class RankTraffic(NamedTuple):
    """Bytes that a rank gives for one token sampled. within: to the ranks with which it shares layers, in all
    stages together. between: to the next stages. prompt: beside them, for a prompt's token that it computes, to the
    ranks with which it shares prompts."""

    within: int
    between: int
    prompt: int = 0

    def __str__(self) -> str:
        parts = (("within layers", self.within), ("between stages", self.between), ("of a prompt's token", self.prompt))
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts if size) or "nothing"


def exchange_of(
    shape: ModelShape, layout: ParallelConfig, element_bytes: int = ELEMENT_BYTES, head_width: int = 0
) -> RankTraffic:
    """Traffic of a layout's ranks, for `quire plan` and sweeps. head_width: see SpeculationConfig."""
    within = 0
    if layout.tp > 1 or layout.replicas_together > 1:
        within = sum(_in_layer(layer, shape.hidden, layout) for layer in shape.layers)
    if layout.tp > 1:
        within += shape.embedding_width + -(-shape.vocab // layout.tp)
    prompt = 0
    if layout.pcp > 1:
        prompt = head_width + sum(layer.attention.token_elements(layout.tp) for layer in shape.layers)
    return RankTraffic(*(each * element_bytes for each in (within, (layout.pp - 1) * shape.hidden, prompt)))


def _in_layer(layer: LayerShape, hidden: int, layout: ParallelConfig) -> int:
    """Elements that a rank gives for a token in one layer."""
    experts, attention = layer.experts, layer.attention
    summed = hidden if layout.tp > 1 else 0
    elements = summed
    if experts is None:
        elements += summed
    else:
        elements += summed if experts.shared_intermediate else 0
        if layout.replicas_together > 1:  # a row with its routing to all ranks, and what its experts give back
            elements += hidden + 2 * experts.num_active + experts.num_active * hidden // layout.tp
        else:
            elements += summed * (1 if layout.redundant_experts is None else experts.num_active)
    if layout.dcp > 1:
        heads = attention.num_heads // layout.tp
        elements += heads * (attention.scored_dim + layout.dcp * (attention.attended_dim + 1))
    return elements
