"""Plots: files that hold what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire.errors import UserError
from quire.simulator.layout import Layout
from quire.simulator.metrics import Metrics
from quire.simulator.plots import figure, plot_latency, plot_memory, plot_pareto
from quire.simulator.replica import simulate
from quire.simulator.sweep import LayoutResult, point
from quire.simulator.workloads import Arrivals, stream
from tests.simulator.making import make_cost, settings

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return simulate(stream("alpaca", Arrivals(50.0, num_requests=30)), make_cost(), settings())


def test_every_plot_is_a_png(tmp_path: Path, metrics: Metrics) -> None:
    plot_memory(tmp_path / "memory.png", metrics, title="a title")
    plot_latency(tmp_path / "latency.png", {1.0: metrics, 2.0: metrics})
    results = [LayoutResult(Layout(tp=tp), (point(Layout(tp=tp), 1.0, metrics),), None) for tp in (1, 2)]
    plot_pareto(tmp_path / "pareto.png", results)
    for name in ("memory", "latency", "pareto"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 5000


def test_what_is_drawn_is_what_was_measured(tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from quire.simulator import plots

    drawn = []

    @contextmanager
    def keep(path: Path, **options: object):  # type: ignore[no-untyped-def]
        with figure(path, **options) as axes:  # type: ignore[arg-type]
            yield axes
            drawn.extend(axes)

    monkeypatch.setattr(plots, "figure", keep)
    plots.plot_latency(tmp_path / "latency.png", {2.0: metrics, 1.0: metrics})
    mean = 1000 * metrics.latencies["normalized_latency"].mean
    assert list(drawn[0].lines[0].get_xdata()) == [1.0, 2.0]
    assert list(drawn[0].lines[0].get_ydata()) == pytest.approx([mean, mean])


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'quire\[bench\]'"), figure(tmp_path / "x.png"):
        pytest.fail("never drawn")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"), figure(tmp_path / "absent" / "x.png"):
        pass
