"""What a run measures, over the fake executor: small workloads whose savings can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.paper.figures import Band, rows
from benchmarks.paper.measure import Usage, beam_search, run, sampling, write_text
from benchmarks.paper.workloads import PaperRequest
from quire.errors import QuireError
from tests.fakes.core import CoreDriver, make_config


def make_core(**options: Any) -> Any:
    options = {"num_blocks": 200, "enable_prefix_caching": False, "max_num_batched_tokens": 256, **options}
    return CoreDriver(make_config(**options)).core


def by_hand(input_len: int, output_len: int, n: int, block_size: int = 4) -> tuple[int, int, int]:
    """(used, logical blocks, stored tokens) of one request, summed over its steps."""
    used = logical = stored = 0
    for generated in range(1, output_len):  # after the last step everything is free
        length = input_len + generated - 1  # the newest token has no keys yet
        blocks = -(-length // block_size)
        shared = blocks if generated == 1 else input_len // block_size
        used += shared + n * (blocks - shared)
        logical += n * blocks
        stored += shared * block_size + n * (length - shared * block_size) if generated > 1 else length
    return used, logical, stored


@pytest.mark.parametrize("n", [1, 2, 4, 6])
@pytest.mark.parametrize(("input_len", "output_len"), [(10, 7), (12, 9), (3, 20), (30, 2)])
def test_sums_of_one_request(n: int, input_len: int, output_len: int) -> None:
    request = PaperRequest(list(range(1, input_len + 1)), output_len)
    usage = run(make_core(), "r", [request], sampling(n))
    used, logical, stored = by_hand(input_len, output_len, n)
    assert (usage.num_used_blocks, usage.num_logical_blocks, usage.num_stored_tokens) == (used, logical, stored)
    assert usage.num_used_slots == 4 * used
    assert usage.num_generated_tokens == n * output_len
    assert usage.saved == 1 - used / logical
    assert usage.stored == stored / (4 * used)


@pytest.mark.parametrize("max_num_seqs", [6, 8])
def test_the_shares_do_not_depend_on_how_many_run_side_by_side(max_num_seqs: int) -> None:
    requests = [PaperRequest(list(range(1, length + 1)), 40 - length) for length in range(3, 30, 3)]
    finished: list[int] = []
    core = make_core(max_num_seqs=max_num_seqs)
    usage = run(core, "r", requests, sampling(3), on_done=finished.append)
    sums = [sum(column) for column in zip(*(by_hand(len(r.token_ids), r.output_len, 3) for r in requests), strict=True)]
    # A request that ends in a step frees its blocks before the step is counted, and so it is in every schedule.
    assert [usage.num_used_blocks, usage.num_logical_blocks, usage.num_stored_tokens] == sums
    assert sum(finished) == len(requests)
    assert usage.num_preemptions == 0
    assert core.stats().num_used_blocks == 0


def test_beams_share_more_than_samples() -> None:
    requests = [PaperRequest(list(range(1, 12)), 30)]
    beams = run(make_core(), "b", requests, beam_search(4))
    samples = run(make_core(), "s", requests, sampling(4))
    assert beams.saved > samples.saved


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(QuireError, match="r-0"):
        run(make_core(num_blocks=4), "r", [PaperRequest([1, 2, 3], 100)], sampling(2))


def test_text_is_as_long_as_asked() -> None:
    core = make_core(num_blocks=1000, max_model_len=600)
    text = write_text(core, 700, seed=1)
    assert len(text) == 1024
    assert len(set(text)) > 10


def test_bands() -> None:
    band = Band(6.1, 9.8, 6.1)
    assert [band.holds(value) for value in (6.0, 6.06, 9.84, 9.86)] == [False, True, True, False]
    assert band.distance(5.1) == pytest.approx(-1.0)
    assert band.distance(10.8) == pytest.approx(1.0)


def test_every_row_has_the_papers_numbers() -> None:
    found = rows()
    assert len(found) == 13
    assert len({row.run_name for row in found}) == 13
    assert [row.band.printed for row in found if row.band.printed is not None] == [
        96.3, 6.1, 9.8, 37.6, 55.2, 16.2, 30.5, 44.3, 66.3
    ]  # fmt: skip
    usage = Usage(num_used_blocks=6, num_logical_blocks=8, num_used_slots=100, num_stored_tokens=97)
    assert [row.value(usage) for row in found] == [97.0] + [25.0] * 12
