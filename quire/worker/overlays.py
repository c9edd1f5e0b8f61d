"""Rows that take the place of tokens' embeddings in a step: an image's, which a source knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.layers.overlay import RowOverlay
from quire.step import StepPlan
from quire.worker.input_batch import InputBatch


class StepOverlay(NamedTuple):
    """rows: [O] int64, ascending: which of the step's T tokens. embeddings, behind: as those of RowOverlay, where the
    model computes. The layers in `behind` are the same in all steps, as each choice of them is a pass of its own."""

    rows: np.ndarray
    embeddings: torch.Tensor
    behind: Mapping[int, torch.Tensor]

    def over(self, rows: torch.Tensor) -> RowOverlay:
        """The input of a forward pass. rows: those of this overlay, where the model computes."""
        return RowOverlay(rows, self.embeddings, self.behind)


class OverlaySource(Protocol):
    """Finds the rows of a step."""

    def of_step(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        """What is put over tokens of this step (None: nothing is). batch: its sequences are those of the plan, at the
        positions that are computed. Called once for each plan, in their order."""
        ...


class NoOverlays:
    """The OverlaySource of a model of text alone."""

    def of_step(self, plan: StepPlan, batch: InputBatch) -> None:
        return None


NO_OVERLAYS = NoOverlays()
