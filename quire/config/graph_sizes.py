"""The ladder: for how many tokens CUDA graphs are captured. A step is padded to the next rung."""

from __future__ import annotations

from collections.abc import Iterable

LARGEST_SIZE = 1024
"""A pass over more tokens takes the device longer than starting its kernels one by one takes the host: a graph saves
nothing there."""
_STEPS = ((4, None), (64, 8), (256, 16), (512, 32), (LARGEST_SIZE, 64))
"""Up to the first number, rungs are so far apart; None: each is twice the one before. Above 32 tokens, padding adds at
most an eighth."""


def default_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Sizes up to LARGEST_SIZE, or to `max_num_seqs` if that is more, and to the budget. `max_num_seqs` is one of them,
    so that a full decode batch is never padded."""
    limit = min(max(LARGEST_SIZE, max_num_seqs), max_num_batched_tokens)
    return tuple(sorted({*(size for size in _rungs(limit) if size <= limit), max_num_seqs}))


def _rungs(limit: int) -> Iterable[int]:
    size = 1
    while size <= limit:
        yield size
        step = next((step for up_to, step in _STEPS if size < up_to), 128)
        size += size if step is None else step - size % step
