from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.layers.overlay import RowOverlay
from quire.step import StepPlan
from quire.worker.input_batch import InputBatch


class StepOverlay(NamedTuple):
    """Vectors that replace embeddings in a step. rows: [O] int64, ascending, indices into the step's T tokens.
    embeddings, behind: see RowOverlay, on the model's device. `behind` has the same layers in all steps: each set of
    layers is a separate pass."""

    rows: np.ndarray
    embeddings: torch.Tensor
    behind: Mapping[int, torch.Tensor]

    def over(self, rows: torch.Tensor) -> RowOverlay:
        """Overlay for a forward pass: replaces embeddings by features. rows: `self.rows` on the model's device."""
        return RowOverlay(rows, self.embeddings, self.behind)


class OverlaySource(Protocol):
    """Source of the rows (image features) that replace tokens' embeddings in a step; ImageOverlays is one."""

    def of_step(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        """Overlay for this step's tokens, or None. batch: plan's sequences at the computed positions. Called once
        per plan, in order."""
        ...
