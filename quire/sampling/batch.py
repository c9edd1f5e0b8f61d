"""The batch of sequences that the sampler samples in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """R sampled rows, in result order. A row appears once.

    rows: [R] int64, the row of each result. lengths: [R] int64, tokens of the sequence so far, the prompt included
    (= position of the token being chosen). num_prompt_tokens: [R] int64. token_ids: [num_rows, capacity] int32, the
    row table's tokens, of which the first `lengths` of a row are valid; read only.
    """

    rows: np.ndarray
    lengths: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids: np.ndarray

    @property
    def num_generated(self) -> np.ndarray:
        """[R] int64: tokens generated so far = index of the generated token that is being chosen."""
        return self.lengths - self.num_prompt_tokens
