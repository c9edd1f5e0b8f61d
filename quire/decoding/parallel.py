"""Sequences of a request, and forks of siblings from the first one: parallel samples at the end of the prompt (paper
§4.4), preempted beams at their first difference."""

from __future__ import annotations

from collections.abc import Iterator

from quire.decoding.beam import BeamSearch
from quire.decoding.sequence import Request, Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.request import EngineRequest, FinishReason, ResumePoint
from quire.step import SequenceFork, SequenceSampling

_MASK = (1 << 64) - 1


def sequence_seed(seed: int, index: int) -> int:
    """64-bit seed of sequence `index` of a request: splitmix64 of the pair, so neighbours are unrelated."""
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def create_sequences(
    request: Request, source: EngineRequest, seq_ids: Iterator[int], kv: KVCacheManager | None = None
) -> None:
    """Create the sequences of a request, one per sample or beam, with ids from `seq_ids`, and its beam search. kv:
    finds their cached blocks; None: no prefix cache."""
    params = source.params
    num_sequences = params.num_sequences
    stop_token_ids = sorted({*source.eos_token_ids, *(params.stop_token_ids or ())})
    num_candidates = 0
    if params.use_beam_search:
        # At least `num_sequences` candidates of each beam must not end it.
        num_candidates = max(num_sequences + len(stop_token_ids), params.logprobs or 0)
    sequences = request.sequences = [
        Sequence(
            next(seq_ids),
            index,
            request,
            SequenceSampling(
                params=params,
                seed=sequence_seed(source.seed, source.first_index + index),
                stop_token_ids=stop_token_ids,
                bad_token_sequences=source.bad_token_sequences,
                num_candidates=num_candidates,
            ),
        )
        for index in range(num_sequences)
    ]
    if source.resume_point is not None:
        _resume(sequences, source.resume_point)
    if kv is not None and not request.bypass_prefix_cache:
        keys = request.extra_keys(kv.hash_block_size)
        for sequence in sequences:
            sequence.chain = kv.new_chain(request.cache_salt, keys)
    if params.use_beam_search:
        request.beam_search = BeamSearch(request)


def _resume(sequences: list[Sequence], point: ResumePoint) -> None:
    """Give new sequences the tokens that another engine generated, from which they continue with the tokens that it
    would have drawn."""
    for sequence, token_ids in zip(sequences, point.token_ids, strict=True):
        sequence.token_ids += token_ids
    for index in point.ended:
        sequences[index].finish_reason = FinishReason.ABORT  # any reason: the caller knows the real one


def num_shared_tokens(request: Request) -> int:
    """Number of known tokens that the first live sequence computes for all; all its own if it is alone. Forks begin
    behind them."""
    if request.beam_search is not None:
        return request.beam_search.num_shared_tokens
    sequences = request.live_sequences
    return request.num_prompt_tokens if len(sequences) > 1 else len(sequences[0].token_ids)


def waiting_siblings(request: Request) -> list[Sequence]:
    """Request's sequences that have no slot yet and will fork from the first one; not beam slots without a beam."""
    if request.beam_search is None:
        return list(request.pending_forks)
    beams = request.beam_search.sequences
    return [sequence for sequence in request.pending_forks if sequence in beams]


def fork_siblings(parent: Sequence, kv: KVCacheManager) -> list[tuple[Sequence, SequenceFork]]:
    """Fork the waiting siblings off `parent`, whose computed tokens are exactly the shared ones. A preempted sibling
    keeps its own tokens and goes on from there."""
    request, num_shared = parent.request, parent.num_computed_tokens
    assert num_shared == request.fork_position
    assert parent.blocks is not None
    forks = []
    for child in waiting_siblings(request):
        child.blocks = kv.fork(parent.blocks, num_shared)
        child.chain = child.blocks.chain
        child.num_computed_tokens = num_shared
        history = list(child.token_ids) if child.num_output_tokens else None
        forks.append((child, SequenceFork(parent.seq_id, child.seq_id, child.sampling, history)))
        request.pending_forks.remove(child)
    request.fork_position = None
    return forks
