from __future__ import annotations

import asyncio
import importlib
import io
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.config.options import EngineOptions
from quire.outputs import CompletionOutput, RequestOutput, raise_if_nonfinite
from quire.sampling_params import SamplingParams

Prompt = str | dict[str, Any]


class Engine(Protocol):
    """Part of `AsyncLLM` that `quire run` and `chat` use."""

    @property
    def tokenizer(self) -> Any: ...

    def generate(
        self, prompt: Any, params: SamplingParams, /, *, delta: bool = False
    ) -> AsyncIterator[RequestOutput]: ...

    async def register_prefix(self, prefix: str, /) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> Any: ...

    def shutdown(self) -> None: ...


def import_executor() -> None:
    """Import the executor before it is needed; during these seconds Ctrl-C waits."""
    from quire.engine.client import DEFAULT_EXECUTOR

    with interrupts_deferred():
        importlib.import_module(DEFAULT_EXECUTOR.partition(":")[0])


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay a Ctrl-C inside the block to its end. Main thread only."""
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


def open_engine(options: EngineOptions) -> Engine:
    """Load the model into this process. Raises any start-up error."""
    from quire.engine.async_engine import AsyncLLM

    import_executor()
    return AsyncLLM.from_options(options, in_process=True)


@dataclass
class Timing:
    """Arrival times of an answer's tokens, in seconds."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add_output(self, output: RequestOutput, num_new_tokens: int) -> None:
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        if num_new_tokens:
            self.count(num_new_tokens)

    def count(self, num_new_tokens: int) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.num_output_tokens += num_new_tokens

    @property
    def ttft(self) -> float:
        return (self.first or self.start) - self.start

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / (self.last - self.start) if self.last is not None else 0.0

    def line(self) -> str:
        return (
            f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} cached), {self.num_output_tokens} "
            f"generated, {self.tokens_per_second:.1f} tokens/s, first after {self.ttft * 1000:.1f} ms"
        )


class RunSession:
    """Runner of one engine on one event loop, made by `session()`."""

    def __init__(self, engine: Engine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._runner = runner

    def preload(self, text: str) -> None:
        """Compute and keep a prefix's KV blocks, before prompts. Raises UserError."""
        self._runner.run(self.engine.register_prefix(text))

    def complete(self, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, Timing]:
        """Whole output, with its times. Raises ModelOutputError, as `stream` does."""
        return self._runner.run(self._complete(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams, take: Callable[[CompletionOutput], None]) -> Timing:
        """Call `take` with each new piece of the completion. An interrupt (Ctrl-C) ends the request and raises
        KeyboardInterrupt."""
        return self._runner.run(self._stream(prompt, params, take))

    async def _complete(self, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, Timing]:
        timing, seen, last = Timing(), 0, None
        async for output in self.engine.generate(prompt, params):
            total = sum(len(completion.token_ids) for completion in output.outputs)
            timing.add_output(output, total - seen)
            seen, last = total, output
        assert last is not None, "a request has at least one output"
        raise_if_nonfinite(last)
        return last, timing

    async def _stream(self, prompt: Prompt, params: SamplingParams, take: Callable[[CompletionOutput], None]) -> Timing:
        timing = Timing()
        async for output in self.engine.generate(prompt, params, delta=True):
            timing.add_output(output, sum(len(completion.token_ids) for completion in output.outputs))
            for completion in output.outputs:
                take(completion)
            raise_if_nonfinite(output)
        return timing


@contextmanager
def session(options: EngineOptions) -> Iterator[RunSession]:
    """Engine of `quire run` or `chat`: loads the model, shuts down at the end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    engine = open_engine(options)
    try:
        with asyncio.Runner() as runner:
            yield RunSession(engine, runner)
    finally:
        engine.shutdown()
