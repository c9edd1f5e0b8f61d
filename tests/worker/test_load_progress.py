"""The progress of loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError
from quire.utils.progress import ProgressBar
from quire.worker import load_progress
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.worker import Worker


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    """For each bar that is made: its total, what was reported, and "closed"."""
    made: list[list[object]] = []

    class Recorder(ProgressBar):
        def __init__(self, description: str, total: int) -> None:
            super().__init__(description, total)
            self.seen: list[object] = [total]
            made.append(self.seen)

        def update(self, completed: int, note: str = "") -> None:
            self.seen.append(completed)

        def __exit__(self, *exception: object) -> None:
            self.seen.append("closed")

    monkeypatch.setattr(load_progress, "ProgressBar", Recorder)
    return made


def worker(path: Path, **options: object) -> Worker:
    config = resolve(EngineOptions.from_keywords({"model": str(path), "num_threads": 1, **options}))
    return Worker(config, CpuPlatform(config))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_reports_mebibytes_up_to_the_total(
    model_path: Path, bars: list[list[object]], load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "MIB", 1000)
    worker(model_path, load_format=load_format).load_model()
    ((total, *seen, last),) = bars
    assert last == "closed"
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert seen[-1] == total


def test_the_bar_goes_away_when_loading_fails(
    model_path: Path, bars: list[list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(
        config: object,
        load: object,
        group: object,
        progress: Callable[[int, int], None],
        runtime: object,
        **more: object,
    ) -> None:
        progress(3 * 2**20, 10 * 2**20)
        raise ModelLoadError("a tensor is missing")

    monkeypatch.setattr("quire.worker.platform.cpu.load_model", fail)
    with pytest.raises(ModelLoadError):
        worker(model_path).load_model()
    assert bars == [[10, 3, "closed"]]
