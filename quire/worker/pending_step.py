"""The future of a plan that was launched; asking for its result waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from quire.errors import QuireError, is_interrupt
from quire.step import StepResult


class PendingStep(Future[StepResult]):
    """The future of one plan. `result` and `exception` complete it: they wait for the device on the caller's thread, so
    that a future whose result is never asked for is never done.

    Steps run and end in order. When an earlier step has failed, this one ran over sequences that lack a token, and
    `result` raises QuireError.
    """

    def __init__(self, step_id: int, collect: Callable[[], StepResult] | None, previous: PendingStep | None) -> None:
        """collect: waits for the result, or raises what went wrong. previous: the step that was launched before."""
        super().__init__()
        self.set_running_or_notify_cancel()  # later plans rely on the effects of this one
        self._step_id = step_id
        self._collect = collect
        self._previous = previous
        self._is_failed = False

    def set_exception(self, exception: BaseException | None) -> None:
        self._is_failed = True
        super().set_exception(exception)

    @property
    def has_failed(self) -> bool:
        """Whether it, or a step before it, is known to have failed."""
        step: PendingStep | None = self
        while step is not None:  # a loop: as many steps may be outstanding as the caller wants
            if step._is_failed:
                return True
            step = step._previous
        return False

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait; return the result, or raise what went wrong. There is no timeout, because a device's work cannot be
        abandoned."""
        assert timeout is None or self.done(), "a step is waited for to its end"
        self.settle()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        assert timeout is None or self.done(), "a step is waited for to its end"
        self.settle()
        return super().exception()

    def settle(self) -> None:
        """Complete the future. Raises an interrupt, which is the caller's, whichever step it waited for."""
        collect, self._collect = self._collect, None
        if collect is None:
            return
        previous, self._previous = self._previous, None
        if previous is not None and previous.exception() is not None:
            self.set_exception(QuireError(f"step {self._step_id} has no result, because an earlier step failed"))
            return
        try:
            result = collect()
        except BaseException as error:
            self.set_exception(error)
            if is_interrupt(error):
                raise
        else:
            self.set_result(result)


def failed_step(step_id: int, error: BaseException) -> PendingStep:
    """A plan that was not launched, or not wholly."""
    pending = PendingStep(step_id, None, None)
    pending.set_exception(error)
    return pending
