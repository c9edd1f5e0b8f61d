"""Histograms: the same exposition as prometheus_client's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from prometheus_client.metrics_core import Metric

from quire.metrics.histogram import Histogram, one_two_five


def rows(family: Metric) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_equals_the_reference() -> None:
    buckets = (0.1, 0.5, 1.0)
    histogram = Histogram("x", "help", buckets)
    reference = Reference("x", "help", buckets=buckets, registry=CollectorRegistry())
    for value in (0.0, 0.1, 0.11, 0.5, 0.75, 1.0, 1.01, 50.0):
        histogram.observe(value)
        reference.observe(value)
    assert rows(histogram.family({})) == rows(next(iter(reference.collect())))


def test_several_equal_observations_at_once() -> None:
    once, often = Histogram("x", "help", (1, 2)), Histogram("x", "help", (1, 2))
    often.observe(1.5, times=3)
    for _ in range(3):
        once.observe(1.5)
    assert rows(once.family({})) == rows(often.family({}))
    assert often.count == 3


def test_one_two_five() -> None:
    assert one_two_five(0.01, 1) == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert one_two_five(1, 30) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(3, 3) == (5,)
