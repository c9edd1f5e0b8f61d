"""What a plan computes, against counting it token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.simulator.work import StepWork
from quire.step import HostTransfers, NewSequence, SequenceSampling, StepPlan


def make_plan(entries: list[tuple[int, int]], **columns: object) -> StepPlan:
    ids = list(range(len(entries)))
    return StepPlan(
        step_id=0,
        seq_ids=ids,
        start_positions=[start for start, _ in entries],
        num_tokens=[count for _, count in entries],
        sample_seq_ids=ids[:1],
        sample_from=ids[:1],
        **columns,
    )


def attended(position: int, window: int | None) -> range:
    """Positions that the token at `position` attends to."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(
    entries=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 30))), min_size=1, max_size=8),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3),
)
def test_counts_are_those_of_every_token(entries: list[tuple[int, int]], windows: list[int | None]) -> None:
    work = StepWork.of(make_plan(entries), windows)
    chunks = [entry for entry in entries if entry[1] > 1]
    singles = [start for start, count in entries if count == 1]
    assert (work.num_tokens, work.num_sequences) == (sum(count for _, count in entries), len(entries))
    assert (work.num_chunks, work.num_decodes, work.num_sampled) == (len(chunks), len(singles), 1)
    for index, window in enumerate(windows):
        assert work.decode_context[index] == sum(len(attended(start, window)) for start in singles)
        assert work.prefill_pairs[index] == sum(
            len(attended(position, window)) for start, count in chunks for position in range(start, start + count)
        )
        assert work.prefill_context[index] == sum(
            len({read for position in range(start, start + count) for read in attended(position, window)})
            for start, count in chunks
        )


SAVED = [(7, 1), (8, 2)]


@pytest.mark.parametrize(
    ("columns", "waits"),
    [
        ({"new_blocks": {0: [[4]]}}, False),
        ({"new_blocks": {0: [[7]]}}, True),
        ({"block_copies": [(3, 7)]}, True),
        ({"block_copies": [(7, 3)]}, False),
        ({"transfers": HostTransfers(SAVED, [(1, 7)])}, True),
        (
            {"new_sequences": [NewSequence(9, [1], 1, [[5, 7]], SequenceSampling(SamplingParams(), 0, [], []))]},
            True,
        ),
    ],
)
def test_who_writes_a_block_that_is_being_saved_waits(columns: dict[str, object], waits: bool) -> None:
    work = StepWork.of(make_plan([(5, 1)], **{"transfers": HostTransfers(SAVED), **columns}))
    assert work.waits_for_swap is waits
    assert work.num_swapped_out == 2
