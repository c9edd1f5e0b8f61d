"""The attention back end of encoders in plain torch: there is no pool, so a step is where its sequences lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from quire.attention.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """spans: of each sequence, the first of its rows and the one behind its last."""

    spans: tuple[tuple[int, int], ...]


class EncoderAttention:
    """AttentionBackend of a model whose operations attend to the rows of the step themselves."""

    def plan(self, batch: AttentionBatch) -> EncoderStep:
        """Every sequence must be in the batch from its first token on."""
        assert not bool(batch.start_positions.any()), "an encoder computes whole sequences"
        bounds: list[int] = batch.query_start.tolist()
        return EncoderStep(tuple(pairwise(bounds)))
