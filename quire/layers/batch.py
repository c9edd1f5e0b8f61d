"""The input of a model's forward pass."""

from __future__ import annotations

from typing import NamedTuple

from quire.attention.device_batch import StepStates
from quire.attention.interface import PlannedStep
from quire.kernels.value import Indices, ReadRows


class ForwardBatch(NamedTuple):
    """One step's T tokens, flat: no batch dimension. Tensors, or placeholders while a model is recorded.

    token_ids, positions: [T]. attention: what the attention back end planned for the step. logits_rows: [R] distinct,
    ascending; the tokens whose hidden states are read, the only ones that the last layer computes behind its attention
    (None: all). states: where layers that keep a state find it (None: no layer does). segments: [T], 1 in the second
    text of a pair, else 0 (None: not needed).
    """

    token_ids: Indices
    positions: Indices
    attention: PlannedStep
    logits_rows: ReadRows | None = None
    states: StepStates | None = None
    segments: Indices | None = None
