from __future__ import annotations

from collections.abc import Callable

from quire.errors import QuireError, is_interrupt
from quire.step import StepResult


class PendingStep:
    """StepFuture (quire/executors/interface.py) without locks: one thread launches, and one thread asks for results.
    `result` and `exception` wait for the device; after a failed step, `result` raises QuireError."""

    __slots__ = ("_callbacks", "_collect", "_error", "_previous", "_result", "_step_id")

    def __init__(
        self,
        step_id: int,
        collect: Callable[[], StepResult] | None,
        previous: PendingStep | None,
        error: BaseException | None = None,
    ) -> None:
        """collect: waits for the result or raises. previous: step launched before. error: from a plan that was not
        fully launched."""
        self._step_id = step_id
        self._collect = collect
        self._previous = previous
        self._result: StepResult | None = None
        self._error = error
        self._callbacks: list[Callable[[PendingStep], object]] = []

    @property
    def has_failed(self) -> bool:
        """True if this step or an earlier one is known to have failed. Later plans then fail too."""
        step: PendingStep | None = self
        while step is not None:  # a loop: as many steps may be outstanding as the caller wants
            if step._error is not None:
                return True
            step = step._previous
        return False

    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the result, or raise the step's error; no timeout is possible."""
        assert timeout is None or self.done(), "a step is waited for to its end"
        self.settle()
        if self._result is None:
            assert self._error is not None, "a step ends in a result or in an error"
            raise self._error
        return self._result

    def exception(self) -> BaseException | None:
        self.settle()
        return self._error

    def add_done_callback(self, callback: Callable[[PendingStep], object]) -> None:
        """Call `callback` with this step when it is done, or at once. Wakes the engine core."""
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def settle(self) -> None:
        """Wait for this step's end, without its error. Raises only interrupts."""
        collect, self._collect = self._collect, None
        if collect is None:
            return
        previous, self._previous = self._previous, None
        try:
            if previous is not None:
                previous.settle()
            if previous is not None and previous._error is not None:
                raise QuireError(f"step {self._step_id} has no result, because an earlier step failed")
            self._result = collect()
        except BaseException as error:
            self._error = error
            if is_interrupt(error):
                raise
        finally:
            for callback in self._callbacks:
                callback(self)
