from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)
"""Type of the kernels' arrays: NumPy on the host, tensors on a device."""


class SampleBatch(NamedTuple, Generic[Array]):
    """R sampled rows, in result order; kernels of all platforms read them. rows_host: [R] int64, row (request slot) of
    each result, on the host; the rest is where the kernels compute. rows: [R], equal to rows_host. lengths: [R], tokens
    of the sequence, prompt included. num_prompt_tokens: [R]. token_table: [num_rows, capacity] int32, with `lengths`
    valid tokens in each row; the sampler writes the chosen token after them."""

    rows_host: np.ndarray
    rows: Array
    lengths: Array
    num_prompt_tokens: Array
    token_table: Array

    @property
    def num_generated(self) -> Array:
        """[R]: number of tokens that each row has generated before this one."""
        return self.lengths - self.num_prompt_tokens


class TokenMasks(NamedTuple):
    """Allowed tokens of M rows of a batch, on the host. indices: [M] int64, in the batch. words: [M, ceil(vocab_size /
    32)] uint32, token t at bit t % 32 of word t // 32."""

    indices: np.ndarray
    words: np.ndarray
