"""Frames of an engine over the fake executor, at moments that a test chooses."""

from __future__ import annotations

from quire.dashboard.frame import Frame, Observations
from tests.fakes.core import CoreDriver


def frame_of(driver: CoreDriver, *, first_tokens: tuple[float, int] = (0.0, 0)) -> Frame:
    return Frame(
        version="0.1.0",
        model="tiny",
        backend="fake executor",
        max_model_len=128,
        is_draining=False,
        time_to_first_token=Observations(*first_tokens),
        stats=driver.core.stats(),
        kv=driver.scheduler.snapshot(driver.clock.now()),
    )
