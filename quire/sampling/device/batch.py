"""The batch of sequences that the device sampler samples in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.triton.sampling_shapes import Histories


@dataclass(frozen=True, slots=True)
class DeviceSampleBatch:
    """R sampled rows, in result order. A row appears once.

    rows_host: [R] int64, to choose kernels by. On the device: rows: [R] int32; lengths: [R] int32, tokens of the
    sequence so far, the prompt included (= position of the token being chosen); num_prompt_tokens: [R] int32;
    token_table: [num_rows, capacity] int32, of which the first `lengths` of a row are valid. The sampled token is
    written behind them.
    """

    rows_host: np.ndarray
    rows: torch.Tensor
    lengths: torch.Tensor
    num_prompt_tokens: torch.Tensor
    token_table: torch.Tensor

    @property
    def histories(self) -> Histories:
        """The columns that kernels need of the rows' tokens."""
        return Histories(self.lengths, self.num_prompt_tokens, self.token_table)
