"""Executors for engine processes, which import them by name: `"tests.fakes.factories:slow"`."""

from __future__ import annotations

from quire.config.engine import EngineConfig
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
