"""EngineClient whose core runs in the caller's thread: for offline use, notebooks and tests."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR, EngineClient
from quire.engine.core import BLOCKED_SECONDS
from quire.engine.loop import advance, build_core
from quire.engine.messages import ClientMessage, EngineOutputs, EngineReady
from quire.engine.output_window import OutputWindow
from quire.errors import ConfigError, EngineDeadError, is_interrupt
from quire.utils.failures import explain


class InProcessClient(EngineClient):
    """EngineClient whose core runs in this process. `receive` handles the messages sent so far and runs one step.
    Without work it waits for a message, at most BLOCKED_SECONDS if a request waits for a matcher or load."""

    def __init__(
        self, options: EngineOptions, *, executor: str = DEFAULT_EXECUTOR, config: EngineConfig | None = None
    ) -> None:
        """Load the model in this call. config: resolved form of `options`, if known. Raises ConfigError, ModelLoadError
        or InsufficientMemoryError."""
        if options.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={options.data_parallel_size} is for engines in processes of their own, and this "
                "one runs in its caller's thread: serve the model, use AsyncLLM, or start one program a replica",
                param="data_parallel_size",
            )
        self._core = build_core(options, executor, config=config)
        self._window = OutputWindow(0.0, SystemClock())  # no window: there is no other process to wake
        self._messages: deque[ClientMessage] = deque()
        self._arrival = threading.Condition()
        self._stepping = threading.Lock()
        self._death: EngineDeadError | None = None

    @property
    def ready(self) -> EngineReady:
        return self._core.ready

    @property
    def silence(self) -> float:
        return 0.0

    def send(self, *messages: ClientMessage) -> None:
        with self._arrival:
            self._raise_if_dead()
            self._messages.extend(messages)
            self._arrival.notify()

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if (self._core.is_blocked or not self._core.has_work) and not self._await_message(deadline):
                return None
            messages = []
            while self._messages:
                messages.append(self._messages.popleft())
            outputs = self._advance(messages)
            if outputs is not None:
                return outputs

    def _await_message(self, deadline: float | None) -> bool:
        with self._arrival:
            self._raise_if_dead()
            if self._core.has_work:
                if not self._messages:
                    self._arrival.wait(BLOCKED_SECONDS)
                return True
            while not self._messages:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._arrival.wait(remaining)
                self._raise_if_dead()
            return True

    def computing(self) -> AbstractContextManager[object]:
        """Context for a caller of many `receive` (quire/executors/interface.py); on exit torch's state in this thread
        is restored."""
        self._raise_if_dead()
        return self._core.computing()

    def idle(self) -> bool:
        """Do one piece of deferred work (such as capturing a CUDA graph) if no other is left; returns whether there was
        any."""
        with self._stepping:
            self._raise_if_dead()
            return self._core.idle()

    def shutdown(self, timeout: float = 5.0) -> None:
        with self._arrival:
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
            self._arrival.notify_all()
        # A step in another thread cannot be interrupted: the core must not be torn down under it.
        if self._stepping.acquire(timeout=timeout):
            try:
                self._core.shutdown()
            finally:
                self._stepping.release()

    def _advance(self, messages: list[ClientMessage]) -> EngineOutputs | None:
        with self._stepping:
            self._raise_if_dead()
            try:
                outputs = advance(self._core, messages, self._window)
                if not self._core.has_work:  # now: a caller of LLM does not call again after its last output
                    self._core.check_when_idle()
                return outputs
            except BaseException as error:  # also an interrupt, which leaves the step half done
                self._death = EngineDeadError(
                    f"the engine core failed: {explain(error)}", summary="the engine core failed"
                )
                if is_interrupt(error):
                    raise
                raise self._death.again() from error
            finally:
                # After a failure, or when a shutdown gave up waiting for this step.
                if self._death is not None:
                    self._core.shutdown()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death.again()
