"""Invariants of waiting and running sequences between two steps. Checks raise AssertionError."""

from __future__ import annotations

from collections.abc import Iterable

from quire.decoding.sequence import Request, Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.queue import Deadlines, RequestQueue
from quire.scheduler.running import RunningSet


def check_requests(
    requests: Iterable[Request], waiting: RequestQueue, running: RunningSet, deadlines: Deadlines, kv: KVCacheManager
) -> None:
    live = list(requests)
    with_blocks = {s.seq_id for request in live for s in request.live_sequences if s.blocks is not None}
    assert with_blocks == {s.seq_id for s in running.sequences}, "request slots and blocks disagree"
    assert kv.num_live_sequences == len(running.sequences), "the KV cache holds a sequence that does not run"
    assert running.num_reserved == sum(len(request.pending_forks) for request in live)
    num_timed = sum(request.params.timeout_s is not None for request in live)
    assert len(deadlines) == num_timed, "the watched time limits are not those of the live requests"
    assert kv.host.num_sequences == check_waiting(waiting, kv), "the host pool holds a running sequence"
    check_running(running.sequences, kv)


def check_waiting(requests: Iterable[Request], kv: KVCacheManager) -> int:
    """Assert that waiting requests own no device blocks (for `Scheduler.check`); returns the number of their sequences
    in the host pool."""
    _check_order(request.sequences[0] for request in requests)
    num_swapped = 0
    for request in requests:
        for sequence in request.live_sequences:
            assert sequence.blocks is None
            assert (sequence.swapped is None) == (sequence.num_computed_tokens == 0), "computed tokens without blocks"
            if sequence.swapped is not None:
                num_swapped += 1
                assert kv.groups.fits(sequence.swapped.tables, sequence.num_computed_tokens)
    return num_swapped


def check_running(sequences: Iterable[Sequence], kv: KVCacheManager) -> None:
    _check_order(sequences)
    for sequence in sequences:
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        assert 0 <= sequence.num_computed_tokens <= known <= sequence.max_total_tokens
        assert 0 <= sequence.num_pending_drafts <= sequence.num_pending_tokens
        assert sequence.blocks is not None
        assert sequence.swapped is None
        assert kv.groups.fits(sequence.blocks.tables, sequence.num_computed_tokens), "too few slots, or unused blocks"
        if sequence.num_computed_tokens < sequence.fast_path_until:
            assert known == sequence.num_computed_tokens + 1, "more than one token is to be computed, or none"
            assert sequence.fast_path_until <= min(sequence.blocks.capacity, sequence.max_total_tokens - 1)
            assert not sequence.blocks.tail_shared
            assert sequence.request.beam_search is None


def _check_order(sequences: Iterable[Sequence]) -> None:
    keys = [sequence.request.order_key for sequence in sequences]
    assert keys == sorted(keys), "sequences are out of order"
