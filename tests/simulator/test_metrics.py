"""Distributions that stay small, and time series that keep their sums."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.simulator import metrics as module
from quire.simulator.metrics import NUM_BINS, MergedDistribution, Metrics, Moments, TimeSeries

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def distribution(values: list[float]) -> MergedDistribution:
    found = MergedDistribution()
    for value in values:
        found.add_value(value)
    return found


@given(values=VALUES, percent=st.floats(0, 100))
def test_few_values_are_exact(values: list[float], percent: float) -> None:
    found = distribution(values)
    assert found.percentile(percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)
    assert (found.count, found.lowest, found.highest) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_many_values_are_counted_in_narrow_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT", 1000)
    rng = random.Random(1)
    values = [0.0, *(rng.lognormvariate(0, 2) for _ in range(20_000))]
    found = distribution(values)
    assert found._values is None
    for percent in (0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 100.0):
        assert found.percentile(percent) == pytest.approx(float(np.percentile(values, percent)), rel=0.006, abs=1e-12)
    assert found.mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("exact", [10, 1000])
def test_merged_distributions_are_those_of_all_values(monkeypatch: pytest.MonkeyPatch, exact: int) -> None:
    monkeypatch.setattr(module, "EXACT", exact)
    values = [float(value) for value in range(1, 61)]
    for split in (0, 5, 30, 55):
        found = distribution(values[:split])
        found.merge(distribution(values[split:]))
        assert found.percentile(90) == pytest.approx(float(np.percentile(values, 90)), rel=0.02)
        assert (found.count, found.lowest, found.highest, found.mean) == (60, 1.0, 60.0, 30.5)


def test_no_values_have_no_percentiles() -> None:
    assert np.isnan(MergedDistribution().percentile(50))
    assert MergedDistribution().as_json() == {}


@given(
    entries=st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.001, 2), st.integers(0, 5)), min_size=1, max_size=80),
)
def test_a_series_keeps_its_sums_in_few_bins(entries: list[tuple[float, float, int]]) -> None:
    series = TimeSeries()
    for start, seconds, running in entries:
        series.add_span(start, Moments(seconds=seconds, running=seconds * running, preemptions=running))
    assert len(series.bins) <= NUM_BINS
    assert sum(each.seconds for each in series.bins) == pytest.approx(sum(seconds for _, seconds, _ in entries))
    assert sum(each.preemptions for each in series.bins) == sum(running for _, _, running in entries)
    for start, _, _ in entries:
        assert series.bins[int(start / series.width)].seconds > 0


def test_a_long_step_lies_in_all_the_bins_that_it_covers() -> None:
    """Else a step of three seconds in bins of one would show 300 % of the memory in use, and then none."""
    series = TimeSeries()
    series.add_span(10.0, Moments(seconds=4.0, running=8.0, waiting=4.0, used_blocks=40.0, preemptions=3, tokens=7))
    rows = series.rows(num_blocks=10)
    assert [row["kv_usage"] for row in rows[10:]] == [1.0] * 4
    assert [row["running"] for row in rows[10:]] == [2.0] * 4
    assert [row["waiting"] for row in rows[10:]] == [1.0] * 4
    assert [row["preemptions"] for row in rows[10:]] == [0, 0, 0, 3]
    assert [row["output_tokens_per_second"] for row in rows[10:]] == [0, 0, 0, 7]
    series.add_span(14.0, Moments(seconds=5000.0, running=5000.0))
    assert len(series.bins) <= NUM_BINS
    assert sum(each.seconds for each in series.bins) == pytest.approx(5004)
    assert max(row["running"] for row in series.rows(10)) <= 2


@pytest.mark.parametrize(("first", "second"), [(10.0, 30_000.0), (30_000.0, 10.0), (100.0, 100.0)])
def test_series_of_different_widths_merge(first: float, second: float) -> None:
    one, other = TimeSeries(), TimeSeries()
    for number in range(100):
        one.add_span(first * number / 100, Moments(seconds=1.0, tokens=2))
        other.add_span(second * number / 100, Moments(seconds=1.0, tokens=3))
    one.merge(other)
    assert sum(each.tokens for each in one.bins) == 500
    assert sum(each.seconds for each in one.bins) == 200
    assert len(one.bins) * one.width >= max(first, second) * 0.99


def test_merged_series_have_the_sums_of_each_bin() -> None:
    """Also where bins hold more than their width: steps count where they begin, replicas run side by side."""
    one, other = TimeSeries(), TimeSeries()
    for number, seconds in enumerate((0.9, 1.004, 1.0, 0.5)):
        for part in range(4):
            one.add_span(number + part / 4, Moments(seconds=seconds / 4, running=2 * seconds / 4, used_blocks=seconds))
            other.add_span(number + part / 4, Moments(seconds=seconds / 4, running=3 * seconds / 4, waiting=seconds))
    one.merge(other)
    one.merge(other)
    found = [(each.seconds, each.running, each.used_blocks, each.waiting) for each in one.bins]
    assert found == [
        pytest.approx((3 * seconds, 8 * seconds, 4 * seconds, 8 * seconds)) for seconds in (0.9, 1.004, 1.0, 0.5)
    ]
    # Of six blocks of both replicas.
    assert one.rows(6)[1]["kv_usage"] == pytest.approx(4 * 1.004 / 6)


def test_what_is_written_of_a_run() -> None:
    metrics = Metrics(
        num_requests=5, num_finished=4, num_input_tokens=30, num_output_tokens=100, end=10.0,
        busy_seconds=2.0, step_seconds=8.0, running_seconds=16.0, kv_seconds=4.0,
    )  # fmt: skip
    metrics.stats.prefix_cache_queries_total, metrics.stats.prefix_cache_hits_total = 20, 5
    found = metrics.as_json()
    assert (found["request_throughput"], found["output_throughput"]) == (0.4, 10.0)
    assert (found["device_busy"], found["mean_batched_requests"], found["mean_kv_usage"]) == (0.25, 2.0, 0.5)
    assert found["prefix_cache_hit_rate"] == 0.25
    metrics.merge(Metrics(end=7.0))
    assert metrics.end == 10.0


def test_counters_of_replicas_add_up() -> None:
    one, other = Metrics(num_requests=3, end=5.0, num_blocks=10), Metrics(num_requests=4, end=7.0, num_blocks=10)
    one.stats.preemptions_total, other.stats.preemptions_total = 2, 3
    one.stats.block_size = 16
    one.merge(other)
    assert (one.num_requests, one.end, one.num_blocks, one.stats.preemptions_total) == (7, 7.0, 20, 5)
    assert one.stats.block_size == 16
