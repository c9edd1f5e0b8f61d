"""Fake executors whose tokens are readable text."""

from __future__ import annotations

import signal
import time

from quire.config.engine import EngineConfig
from quire.step import SequenceSampling
from tests.fakes.executor import FakeExecutor
from tests.fakes.fates import FatedExecutor
from tests.fakes.masks import MaskingExecutor
from tests.server.model_directory import VOCAB_SIZE

COPY = 28
"""The token of an equals sign."""
END_TOKEN = 257
EXCLAMATION, QUESTION = 0, 30
FIRST_LETTER = 64
FAILING_STEP_SECONDS = 0.02
SLOW_STEP_SECONDS = 0.1
VERY_SLOW_STEP_SECONDS = 0.4


def choose(sampling: SequenceSampling, index: int, token_ids: list[int]) -> int:
    """Copy what stands behind "=" in the prompt (up to an end token), then end. For any other prompt a letter that
    depends on everything before it."""
    prompt = token_ids[: len(token_ids) - index]
    if COPY in prompt:
        text = prompt[prompt.index(COPY) + 1 :]
        text = text[: text.index(END_TOKEN)] if END_TOKEN in text else text
        return text[index] if index < len(text) else END_TOKEN
    seed = 0 if sampling.params.is_greedy else sampling.seed
    return FIRST_LETTER + hash((seed, index, *token_ids)) % 26


def readable(config: EngineConfig) -> FakeExecutor:
    return MaskingExecutor(vocab_size=VOCAB_SIZE, choose=choose)


def slow(config: EngineConfig) -> FakeExecutor:
    """A request of 200 tokens takes 20 seconds: a test acts before it has ended. A test that waits for its end makes
    the steps short: `Served.hurry`, or `Process.hurry` where the engine is a process of its own."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, choose=choose, latency=SLOW_STEP_SECONDS)


def fated(config: EngineConfig) -> FatedExecutor:
    return FatedExecutor(readable(config))


def fated_slow(config: EngineConfig) -> FatedExecutor:
    return FatedExecutor(slow(config))


def slow_between_signals(config: EngineConfig) -> FakeExecutor:
    """In a process of its own: as slow as `very_slow`, but for the time from a SIGUSR1 to a SIGUSR2."""
    executor = very_slow(config)
    signal.signal(signal.SIGUSR1, lambda *_: executor.hurry.set())
    signal.signal(signal.SIGUSR2, lambda *_: executor.hurry.clear())
    return executor


def very_slow(config: EngineConfig) -> FakeExecutor:
    """A request of 200 tokens takes it 80 seconds: a test acts before any has ended, whatever else the machine does."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, choose=choose, latency=VERY_SLOW_STEP_SECONDS)


def nonfinite(config: EngineConfig) -> FakeExecutor:
    """Computes no numbers behind an exclamation mark, which is the third token behind a prompt with a question mark."""

    def exclaim(sampling: SequenceSampling, index: int, token_ids: list[int]) -> int:
        is_due = index == 2 and QUESTION in token_ids[:-2]
        return EXCLAMATION if is_due else choose(sampling, index, token_ids)

    executor = FakeExecutor(vocab_size=VOCAB_SIZE, choose=exclaim)
    executor.nonfinite_token = EXCLAMATION
    return executor


def failing(config: EngineConfig) -> FakeExecutor:
    """Dies at its tenth step."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, choose=choose, latency=FAILING_STEP_SECONDS, fail_at_step=10)


def never_ready(config: EngineConfig) -> FakeExecutor:
    """Takes an hour to make."""
    time.sleep(3600)
    return readable(config)
