"""Parallel sampling: the `n` sequences of a request, and how they fork at the end of the prompt (paper §4.4)."""

from __future__ import annotations

from collections.abc import Iterator

from quire.kv_cache.manager import KVCacheManager
from quire.request import EngineRequest, Request, Sequence
from quire.step import SequenceFork, SequenceSampling

_MASK = (1 << 64) - 1


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sequence `index` of a request (splitmix64 of the pair: neighbours have nothing in common)."""
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def create_sequences(request: Request, source: EngineRequest, seq_ids: Iterator[int]) -> list[Sequence]:
    """One Sequence per completion, ids drawn from `seq_ids`."""
    params = source.params
    stop_token_ids = sorted({*source.eos_token_ids, *(params.stop_token_ids or ())})
    return [
        Sequence(
            next(seq_ids),
            index,
            request,
            SequenceSampling(
                params=params,
                seed=sequence_seed(source.seed, index),
                stop_token_ids=stop_token_ids,
                bad_token_sequences=source.bad_token_sequences,
            ),
        )
        for index in range(params.n)
    ]


def fork_at_prompt_end(parent: Sequence, kv: KVCacheManager) -> list[tuple[Sequence, SequenceFork]]:
    """Fork the waiting siblings off `parent`, whose computed tokens are exactly the prompt.

    A sibling with a history of its own (it was preempted) brings its tokens and goes on from the prompt's end.
    """
    request = parent.request
    assert parent.num_computed_tokens == request.num_prompt_tokens
    assert parent.blocks is not None
    forks = []
    for child in request.unforked:
        child.blocks = kv.fork(parent.blocks, request.num_prompt_tokens)
        child.chain = child.blocks.chain
        child.num_computed_tokens = request.num_prompt_tokens
        history = list(child.token_ids) if child.num_output_tokens else None
        forks.append((child, SequenceFork(parent.seq_id, child.seq_id, child.sampling, history)))
    request.unforked = []
    return forks
