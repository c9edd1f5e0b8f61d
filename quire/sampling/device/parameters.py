"""The sampling parameters of every live row: words on the device, and the columns by which the host chooses kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from quire.kernels.triton import sampling_words as columns
from quire.sampling.device.lists import RowLists
from quire.sampling.draw import MIN_TEMPERATURE
from quire.sampling.parameters import SEED_MASK, features_of
from quire.step import SequenceSampling

MAX_WORD = 2**31 - 1


class WordWriter(Protocol):
    """Records staged writes to the parameters on the device."""

    def write(self, offset: int, values: np.ndarray) -> None:
        """values: [N] int32, for the words from `offset` of the arena on."""
        ...


class DeviceSamplingRows:
    """Parameters of `num_rows` rows.

    words: [num_rows, WIDTH] int32, on the device. features, num_logprobs, num_candidates, num_prompt_logprobs:
    [num_rows] int64, on the host.
    """

    WIDTH = columns.NUM_WORDS

    def __init__(self, num_rows: int, words: torch.Tensor, offset: int) -> None:
        """offset: where `words` begins in the arena that writers write to. Row i is at offset + i * words.stride(0)."""
        assert words.shape == (num_rows, self.WIDTH), f"{words.shape} words for {num_rows} rows"
        self.words = words
        self.lists = RowLists(num_rows, words.device)
        self.features = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.num_candidates = np.zeros(num_rows, np.int64)
        self.num_prompt_logprobs = np.zeros(num_rows, np.int64)
        self.rows_with_prompt_logprobs: set[int] = set()
        self._offset = offset
        self._stride = words.stride(0)

    def set(self, row: int, sampling: SequenceSampling, writes: WordWriter) -> None:
        """Give `row` these parameters, in place of what it had."""
        params = sampling.params
        self.features[row] = features_of(sampling)
        self.num_logprobs[row] = params.logprobs or 0
        self.num_candidates[row] = sampling.num_candidates
        self.num_prompt_logprobs[row] = params.prompt_logprobs or 0
        self.rows_with_prompt_logprobs.discard(row)
        if params.prompt_logprobs is not None:
            self.rows_with_prompt_logprobs.add(row)
        stop_tokens = sampling.stop_token_ids if params.min_tokens else ()
        allowed = params.allowed_token_ids or ()
        self.lists.set(row, params.logit_bias or {}, stop_tokens, sampling.bad_token_sequences, allowed)
        writes.write(self._offset + row * self._stride, pack_words(sampling))

    def row_at(self, offset: int) -> int:
        """The row whose words begin at an offset of the arena."""
        return (offset - self._offset) // self._stride

    def clear(self, row: int) -> None:
        """Drop what `row` owns beyond its words (those are overwritten by the next owner)."""
        self.lists.set(row, {}, (), (), ())
        self.rows_with_prompt_logprobs.discard(row)

    def used(self, rows: np.ndarray) -> int:
        """The union of `Feature` over `rows` ([R] int64)."""
        return int(np.bitwise_or.reduce(self.features[rows]))


def pack_words(sampling: SequenceSampling) -> np.ndarray:
    """[NUM_WORDS] int32, as `quire.kernels.triton.sampling_words` reads them."""
    params = sampling.params
    words = np.zeros(columns.NUM_WORDS, np.int32)
    floats = words.view(np.float32)
    words[columns.FEATURES.value] = features_of(sampling)
    words[columns.SEED.value : columns.SEED.value + 2] = np.array([sampling.seed & SEED_MASK], np.uint64).view(np.int32)
    words[columns.TOP_P.value : columns.TOP_P.value + 2] = np.array([params.top_p], np.float64).view(np.int32)
    words[columns.TOP_K.value] = min(max(params.top_k, 0), MAX_WORD)
    floats[columns.TEMPERATURE.value] = 0 if params.is_greedy else max(np.float32(params.temperature), MIN_TEMPERATURE)
    floats[columns.MIN_P.value] = params.min_p
    floats[columns.PRESENCE_PENALTY.value] = params.presence_penalty
    floats[columns.FREQUENCY_PENALTY.value] = params.frequency_penalty
    floats[columns.REPETITION_PENALTY.value] = params.repetition_penalty
    words[columns.MIN_TOKENS.value] = min(params.min_tokens, MAX_WORD)
    return words
