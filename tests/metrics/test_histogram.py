"""Histograms: the same exposition as prometheus_client's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from prometheus_client.metrics_core import Metric

from quire.metrics.prometheus import Histogram


def rows(family: Metric) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_equals_the_reference() -> None:
    buckets = (0.1, 0.5, 1.0)
    histogram = Histogram("help", buckets)
    reference = Reference("x", "help", buckets=buckets, registry=CollectorRegistry())
    for value in (0.0, 0.1, 0.11, 0.5, 0.75, 1.0, 1.01, 50.0):
        histogram.observe(value)
        reference.observe(value)
    assert rows(histogram.family("x", {})) == rows(next(iter(reference.collect())))


def test_several_equal_observations_at_once() -> None:
    once, often = Histogram("help", (1, 2)), Histogram("help", (1, 2))
    often.observe(1.5, times=3)
    for _ in range(3):
        once.observe(1.5)
    assert rows(once.family("x", {})) == rows(often.family("x", {}))
    assert often.count == 3
