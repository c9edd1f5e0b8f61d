"""A step that was enqueued: its result, or what went wrong, is known when it is waited for."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import QuireError
from quire.step import StepResult


class PendingStep:
    """The future of one plan. Steps run in order on the device, and results are taken in order as well, whoever asks:
    when an earlier step has failed, this one ran over rows that lack a token, so that it has no result."""

    def __init__(self, step_id: int, collect: Callable[[], StepResult], previous: PendingStep | None) -> None:
        """collect: waits for the result; raises what went wrong. previous: the step that was enqueued before."""
        self.step_id = step_id
        self._collect: Callable[[], StepResult] | None = collect
        self._previous = previous
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed."""
        return self._error is not None

    def result(self) -> StepResult:
        """Wait; return the result. Raises what went wrong, as often as asked."""
        self._settle()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a step that has settled without an error has a result"
        return self._result

    def _settle(self) -> None:
        collect, self._collect = self._collect, None
        if collect is None:
            return
        previous, self._previous = self._previous, None
        if previous is not None:
            previous._settle()
            if previous.has_failed:
                self._error = QuireError(f"step {self.step_id} has no result, because an earlier step failed")
                return
        try:
            self._result = collect()
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = error
            raise


def failed_step(step_id: int, error: Exception) -> PendingStep:
    """A plan that was not enqueued, or not wholly."""

    def fail() -> StepResult:
        raise error

    pending = PendingStep(step_id, fail, None)
    pending._settle()
    return pending
