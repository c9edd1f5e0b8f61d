"""Plots: files that hold what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.parallel import ParallelConfig
from quire.errors import UserError
from quire.simulator.metrics import Metrics, Moments
from quire.simulator.plots import figure, plot_latency, plot_memory, plot_pareto
from quire.simulator.replica import simulate
from quire.simulator.sweep import SweepResult, point
from quire.simulator.workloads import Arrivals, stream
from tests.simulator.making import make_cost, settings

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return simulate(stream("alpaca", Arrivals(50.0, num_requests=30)), make_cost(), settings())


def test_every_plot_is_a_png(tmp_path: Path, metrics: Metrics) -> None:
    plot_memory(tmp_path / "memory.png", metrics, title="a title")
    plot_latency(tmp_path / "latency.png", {1.0: metrics, 2.0: metrics})
    results = [SweepResult(ParallelConfig(tp=tp), (point(ParallelConfig(tp=tp), 1.0, metrics),), None) for tp in (1, 2)]
    plot_pareto(tmp_path / "pareto.png", results)
    for name in ("memory", "latency", "pareto"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 5000


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of whatever is drawn in a test."""
    from contextlib import contextmanager

    from quire.simulator import plots

    drawn: list[Any] = []

    @contextmanager
    def keep(path: Path, **options: object):  # type: ignore[no-untyped-def]
        with figure(path, **options) as axes:  # type: ignore[arg-type]
            yield axes
            drawn.extend(axes)

    monkeypatch.setattr(plots, "figure", keep)
    return drawn


def test_latencies_are_drawn(tmp_path: Path, metrics: Metrics, drawn: list[Any]) -> None:
    plot_latency(tmp_path / "latency.png", {2.0: metrics, 1.0: metrics})
    mean = 1000 * metrics.latencies["normalized_latency"].mean
    assert list(drawn[0].lines[0].get_xdata()) == [1.0, 2.0]
    assert list(drawn[0].lines[0].get_ydata()) == pytest.approx([mean, mean])
    for axis, name in zip(drawn, ("normalized_latency", "ttft", "tpot"), strict=True):
        highest = 1000 * metrics.latencies[name].percentile(99)
        assert list(axis.lines[1].get_ydata()) == pytest.approx([highest, highest])
        assert axis.get_ylim()[0] == 0 or axis.get_yscale() == "log"
        assert axis.get_ylim()[1] > highest


def test_latencies_far_apart_have_a_logarithmic_axis(tmp_path: Path, drawn: list[Any]) -> None:
    runs = {}
    for rate, seconds in ((1.0, 0.01), (2.0, 5.0)):
        runs[rate] = Metrics()
        for distribution in runs[rate].latencies.values():
            distribution.add_value(seconds)
    plot_latency(tmp_path / "latency.png", runs)
    assert [axis.get_yscale() for axis in drawn] == ["log"] * 3


def test_the_state_over_time_is_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    metrics = Metrics(num_blocks=10)
    metrics.series.add_span(0.0, Moments(seconds=1.0, running=3.0, waiting=2.0, used_blocks=5.0))
    metrics.series.add_span(1.0, Moments(seconds=1.0, running=4.0, waiting=7.0, used_blocks=10.0, preemptions=6))
    plot_memory(tmp_path / "memory.png", metrics)
    usage, requests, preemptions = drawn
    assert usage.get_ylim() == (0, 100)
    assert usage.collections[0].get_paths()[0].vertices[:, 1].max() == 100
    assert [list(line.get_ydata()) for line in requests.lines] == [[3.0, 4.0], [2.0, 7.0]]
    assert [bar.get_height() for bar in preemptions.patches] == [0, 6]
    assert preemptions.get_ylim()[0] == requests.get_ylim()[0] == 0


def test_layouts_are_drawn_by_what_a_user_sees(tmp_path: Path, drawn: list[Any]) -> None:
    metrics = Metrics(num_output_tokens=100, end=1.0)
    metrics.latencies["tpot"].add_value(0.02)
    layout = ParallelConfig(tp=4)
    plot_pareto(tmp_path / "pareto.png", [SweepResult(layout, (point(layout, 1.0, metrics),), None)])
    (axis,) = drawn
    for line in axis.lines:  # the layout's, and the front
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([pytest.approx(50.0)], [25.0])
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [str(layout), "Pareto front"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[bench\]'"), figure(tmp_path / "x.png"):
        pytest.fail("never drawn")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"), figure(tmp_path / "absent" / "x.png"):
        pass
