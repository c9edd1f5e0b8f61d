"""Synthetic requests: the means that are promised, the same for the same seed, drawn one at a time."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.simulator.tokens import (
    ALIKE,
    BEAM_GAP,
    BEST_LOSS,
    GROUP_TOKENS,
    OWN_TOKENS,
    Streams,
    first_of_group,
    prompt_tokens,
)
from quire.simulator.workloads import ALPACA, SHAREGPT, WORKLOADS, Arrivals, lengths, stream, uncorrelated
from quire.step import NewSequence, SequenceFork, SequenceSampling, StepPlan


@pytest.mark.parametrize(("name", "shape"), [("sharegpt", SHAREGPT), ("alpaca", ALPACA)])
def test_lengths_have_the_papers_means(name: str, shape: object) -> None:
    requests = list(stream(name, Arrivals(1.0, num_requests=20_000)))
    for length, mean in (("input_tokens", shape.mean_input), ("output_tokens", shape.mean_output)):  # type: ignore[attr-defined]
        values = [getattr(request, length) for request in requests]
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert statistics.fmean(values) == pytest.approx(mean, abs=4 * error)
        assert statistics.median(values) < 0.8 * mean, "not heavy-tailed"


def test_the_spread_of_lengths_is_that_of_the_papers_figure_2() -> None:
    """A token belongs to an output of 592 tokens on average, E[o^2] / E[o], after what Orca (Max) holds there."""
    outputs = lengths(SHAREGPT.mean_output, 4000, 1536)
    assert sum(output**2 for output in outputs) / sum(outputs) == pytest.approx(592, rel=0.03)
    assert (outputs[0] >= 1, outputs[-1]) == (True, 1536)


def test_lengths_are_paired_without_correlation() -> None:
    inputs, outputs = lengths(161.0, 300, 512), lengths(338.0, 300, 1536)
    pairs = uncorrelated(inputs, outputs, random.Random(1))
    assert sorted(first for first, _ in pairs) == inputs
    assert sorted(second for _, second in pairs) == outputs
    assert abs(statistics.correlation(*zip(*pairs, strict=True))) < 0.01


@pytest.mark.parametrize(("name", "shared"), [("translation", 341), ("translation-1shot", 80)])
def test_translations_share_their_examples(name: str, shared: int) -> None:
    requests = list(stream(name, Arrivals(1.0, num_requests=4000)))
    assert {request.prefix_tokens for request in requests} == {shared}
    assert len({request.prefix_group for request in requests}) == 1
    assert statistics.fmean(request.input_tokens - shared for request in requests) == pytest.approx(28, rel=0.06)
    assert statistics.fmean(request.output_tokens for request in requests) == pytest.approx(28, rel=0.06)


def test_most_prompts_of_chats_are_cut() -> None:
    """A first turn is one of twelve, six in ten of them below 150 tokens; on average there are 5.5 turns of 499 tokens
    before one, so that the cut is reached from the third or fourth turn on."""
    requests = list(stream("chat", Arrivals(1.0, num_requests=4000)))
    prompts = [request.input_tokens for request in requests]
    assert max(prompts) == max(request.output_tokens for request in requests) == 1024
    assert 0.70 < sum(prompt == 1024 for prompt in prompts) / len(prompts) < 0.85
    assert 0.04 < sum(prompt < 150 for prompt in prompts) / len(prompts) < 0.065
    assert {request.prefix_group for request in requests} == {None}


def test_seeds_draw_other_lengths_and_other_arrivals() -> None:
    one, two = (list(stream("alpaca", Arrivals(1.0, num_requests=20), seed)) for seed in (1, 2))
    assert [request.input_tokens for request in one] != [request.input_tokens for request in two]
    assert [request.arrival for request in one] != [request.arrival for request in two]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = [request.arrival for request in stream("alpaca", Arrivals(5.0, burstiness, num_requests=20_000))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_same_requests_arrive_at_another_rate() -> None:
    slow, fast = (list(stream("sharegpt", Arrivals(rate, num_requests=50), 7)) for rate in (1.0, 4.0))
    assert [(r.input_tokens, r.output_tokens) for r in slow] == [(r.input_tokens, r.output_tokens) for r in fast]
    assert [r.arrival for r in fast] == pytest.approx([r.arrival / 4 for r in slow])


def test_a_stream_ends_with_its_time_or_its_number() -> None:
    assert all(request.arrival < 10 for request in stream("alpaca", Arrivals(20.0, duration=10.0)))
    assert len(list(stream("alpaca", Arrivals(20.0, duration=1e9, num_requests=5)))) == 5
    assert {request.arrival for request in stream("alpaca", Arrivals(math.inf, num_requests=5))} == {0.0}


def test_every_workload_fits_the_papers_models() -> None:
    for name in WORKLOADS:
        for request in stream(name, Arrivals(1.0, num_requests=300)):
            assert request.input_tokens >= 1
            assert request.input_tokens + request.output_tokens <= 2048
            assert request.prefix_tokens < request.input_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 5.0), "rate must be above 0"),
        ((math.nan, 1.0, 5.0), "rate must be above 0"),
        ((1.0, 0.0, 5.0), "burstiness"),
        ((1.0, 1.0, None), "must end"),
        ((math.inf, 1.0, 5.0), "needs --num-requests"),
        ((1.0, 1.0, -5.0), "duration must be above 0"),
    ],
)
def test_arrivals_that_make_no_sense(arguments: tuple[float, float, float | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Arrivals(*arguments)


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'alpaca'"):
        list(stream("alpacca", Arrivals(1.0, num_requests=1)))


def test_prompts_share_what_they_should_and_begin_differently_after() -> None:
    first, second = prompt_tokens(1, 50, "a", 20), prompt_tokens(2, 60, "a", 20)
    assert first[:20] == second[:20]
    assert not set(first[20:21]) & set(second)
    assert len(first) == 50
    assert prompt_tokens(1, 5, None, 0)[0] != prompt_tokens(2, 5, None, 0)[0]
    assert OWN_TOKENS <= min(prompt_tokens(10**12, 9, None, 0)) < GROUP_TOKENS <= first_of_group("a")
    assert max(first) < 2**32, "the prefix cache hashes 32 bits of a token"


BEAM = SequenceSampling(SamplingParams(), 0, [], [], num_candidates=4)


def plan_of(step_id: int, seq_ids: list[int], **changes: object) -> StepPlan:
    ones = [1] * len(seq_ids)
    return StepPlan(step_id, seq_ids, ones, ones, seq_ids, list(range(len(seq_ids))), **changes)  # type: ignore[arg-type]


def test_beams_are_as_sure_as_each_other_half_of_the_time() -> None:
    """Falling scores with the means that were measured; alike within a search, and not with another one's."""
    streams = Streams()
    streams.follow(plan_of(0, [1, 5], new_sequences=[NewSequence(i, [7], 1, [[]], BEAM) for i in (1, 5)]))
    streams.follow(plan_of(1, [1, 2, 5], beam_reorders=[SequenceFork(1, 2, BEAM)]))
    found = [[scores for _, _, scores in streams.beams(plan_of(step, [1, 2, 5]))] for step in range(2, 8000)]
    assert found == [[scores for _, _, scores in streams.beams(plan_of(step, [1, 2, 5]))] for step in range(2, 8000)]
    assert all(scores == sorted(scores, reverse=True) for beams in found for scores in beams)
    losses = [[-beams[beam][0] for beams in found] for beam in range(3)]
    gaps = [[beams[beam][0] - beams[beam][1] for beams in found] for beam in range(3)]
    for drawn, mean in ((losses, BEST_LOSS), (gaps, BEAM_GAP)):
        assert statistics.fmean(drawn[0]) == pytest.approx(mean, rel=0.05)
        assert statistics.correlation(drawn[0], drawn[1]) == pytest.approx(ALIKE**2, abs=0.05)
        assert abs(statistics.correlation(drawn[0], drawn[2])) < 0.05


def test_sequences_of_a_request_are_counted_once() -> None:
    streams, single = Streams(), SequenceSampling(SamplingParams(), 0, [], [])
    assert streams.num_requests(plan_of(0, [1, 2, 3])) == 3
    streams.follow(plan_of(1, [1, 2], forks=[SequenceFork(1, 4, single), SequenceFork(1, 5, single)]))
    assert streams.num_requests(plan_of(2, [1, 2, 4, 5])) == 2
    streams.follow(plan_of(3, [2, 4], released=[1], beam_reorders=[SequenceFork(4, 6, single)]))
    assert streams.num_requests(plan_of(4, [2, 4, 6])) == 2
    streams.follow(plan_of(5, [2], released=[4, 5, 6]))
    assert streams.num_requests(plan_of(6, [2])) == 1
