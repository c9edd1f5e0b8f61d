"""Executors for engine processes, which import them by name: `"tests.fakes.factories:slow"`."""

from __future__ import annotations

import ctypes
import time

from quire.config.engine import EngineConfig
from quire.step import SequenceSampling
from tests.fakes.executor import FakeExecutor


def plain(config: EngineConfig) -> FakeExecutor:
    return FakeExecutor(windows=config.model.sliding_windows, vocab_size=config.model.vocab_size)


def slow(config: EngineConfig) -> FakeExecutor:
    """20 ms a step: long enough to act while a request runs."""
    return FakeExecutor(windows=config.model.sliding_windows, vocab_size=config.model.vocab_size, latency=0.02)


def failing_step(config: EngineConfig) -> FakeExecutor:
    return FakeExecutor(windows=config.model.sliding_windows, vocab_size=config.model.vocab_size, fail_at_step=3)


def failing_load(_config: EngineConfig) -> FakeExecutor:
    return FakeExecutor(load_error=RuntimeError("injected failure of the load"))


def stuck_load(_config: EngineConfig) -> FakeExecutor:
    time.sleep(3600)
    raise AssertionError("the test should have ended this process")


def stuck_step(_config: EngineConfig) -> FakeExecutor:
    return FakeExecutor(latency=3600)


def crashing_step(config: EngineConfig) -> FakeExecutor:
    """The third token is a segmentation fault."""

    def read_address_zero(_sampling: SequenceSampling, index: int, _token_ids: list[int]) -> int:
        return 1 if index < 2 else ctypes.string_at(0)[0]

    return FakeExecutor(windows=config.model.sliding_windows, choose=read_address_zero)


def busy_step(config: EngineConfig) -> FakeExecutor:
    """A step takes an hour of computing."""

    def compute(_sampling: SequenceSampling, _index: int, _token_ids: list[int]) -> int:
        until = time.monotonic() + 3600
        while time.monotonic() < until:
            pass
        return 1

    return FakeExecutor(windows=config.model.sliding_windows, choose=compute)
