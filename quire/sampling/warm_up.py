from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.parameters import SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling

GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}
EDITS: dict[str, Any] = {"logit_bias": {0: 1.0}, "repetition_penalty": 1.1, "min_tokens": 1, "allowed_token_ids": [0]}
BATCHES: tuple[tuple[dict[str, Any], ...], ...] = (
    (GREEDY, GREEDY),
    (RANDOM, GREEDY),
    (FILTERED, GREEDY),
    (FILTERED, RANDOM),
    ({**GREEDY, "logprobs": 1}, {**RANDOM, "logprobs": 1}),
    ({**GREEDY, **EDITS}, GREEDY),
    ({**RANDOM, **EDITS}, GREEDY),
    ({**FILTERED, **EDITS}, GREEDY),
    ({**FILTERED, **EDITS}, RANDOM),
    ({**GREEDY, **EDITS, "logprobs": 1}, GREEDY),
    ({"use_beam_search": True, "n": 2}, GREEDY),
)
"""Batches of two rows that use every set of kernels, over the model's logits and over scores."""


def warm_up(
    sampler: Sampler[torch.Tensor],
    rows: SamplingRows,
    words: torch.Tensor,
    token_table: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Compile a device's kernels before the first request, by sampling dummy requests in the first slots, which must be
    free. words: the rows' words, on the device. token_table: [num_rows, capacity] int32; the beginnings of its first
    two rows are overwritten. logits: [2, vocab_size] in the model's type; overwritten."""
    count = min(2, len(words))
    logits = logits[:count]
    column = torch.arange(count, dtype=torch.int32, device=logits.device)
    token_table[:count, :2] = 0
    lengths = torch.ones_like(column)
    batch = SampleBatch(np.arange(count), column, lengths, lengths, token_table)

    def set_row(row: int, sampling: SequenceSampling) -> None:
        rows.set(row, sampling)
        words[row].copy_(torch.from_numpy(rows.words(row)))

    for options_of_rows in BATCHES:
        for row, options in enumerate(options_of_rows[:count]):
            params = SamplingParams(**options)
            num_candidates = 2 if params.use_beam_search else 0
            set_row(row, SequenceSampling(params, 0, [0], [[0]], num_candidates))
        sampler.sample(logits, batch)
    sampler.sample(logits, batch, TokenMasks(np.arange(count), np.ones((count, -(-logits.shape[1] // 32)), np.uint32)))
    sampler.logprobs(logits, token_table[0, :count], 1)
    for row in range(count):
        set_row(row, SequenceSampling(SamplingParams(), 0, [], []))
        rows.clear(row)
