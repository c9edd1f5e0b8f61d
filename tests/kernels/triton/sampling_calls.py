"""How a step of Qwen3-8B launches the sampling kernels, for `tests.kernels.triton.ahead_of_time`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.kernels.triton import filters, logprobs, penalties, rules, sampling
from quire.kernels.triton.sampling_shapes import Histories, SamplingShapes, allocate_buffers
from quire.sampling.parameters import NUM_WORDS, Feature

VOCAB, ROWS, FILTERED = 151936, 8, Feature.FILTERS


def sampling_calls() -> list[Callable[[], object]]:
    host = torch.device("cpu")
    int32 = partial(torch.empty, dtype=torch.int32, device=host)
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=host)
    scores = torch.empty(ROWS, VOCAB, dtype=torch.float32, device=host)
    rows, words, lists = int32(ROWS), int32(256, NUM_WORDS), int32(4096)
    histories = Histories(int32(ROWS), int32(ROWS), int32(256, 40964))
    shapes = SamplingShapes()
    buffers = allocate_buffers(ROWS, VOCAB, shapes, host, filtered=True)
    both = (rows, words, histories, buffers, shapes)
    result = int32(ROWS, logprobs.result_words(20))
    return [
        lambda: sampling.scan(logits, rows, words, buffers, shapes, random=False, filtered=0),
        lambda: sampling.scan(scores, rows, words, buffers, shapes, random=True, filtered=FILTERED),
        lambda: sampling.pick(logits, *both, random=True, filtered=0),
        lambda: filters.cutoff(rows, words, VOCAB, buffers, shapes, FILTERED),
        lambda: filters.collect(logits, rows, words, buffers, shapes, FILTERED),
        lambda: filters.pick_filtered(logits, *both, FILTERED),
        lambda: penalties.apply_penalties(scores, rows, words, histories, int32(ROWS, VOCAB)),
        lambda: rules.add_logit_bias(scores, rows, lists),
        lambda: rules.ban_stop_tokens(scores, rows, words, histories, lists),
        lambda: rules.ban_sequences(scores, rows, histories, lists),
        lambda: rules.keep_allowed(scores, rows, lists, 64),
        lambda: filters.process(logits, rows, scores, rows, words, (Feature.LOGPROBS, FILTERED), -1e30, shapes.lanes),
        lambda: logprobs.rank(logits, rows, result, rows, words, normalized=True),
        lambda: logprobs.rank(scores, rows, result, rows, words, Feature.LOGPROBS, normalized=False),
        lambda: logprobs.rank(scores, None, result, rows, words, Feature.CANDIDATES, normalized=False),
        lambda: logprobs.normalize(scores, rows, words, Feature.CANDIDATES),
    ]
