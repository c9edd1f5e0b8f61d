"""A progress bar for loading weights, in MiB."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from quire.utils.progress import ProgressBar

MIB = 2**20


class LoadProgress:
    """The progress callback of `load_model`, and a context manager that removes the bar at its end.

    The first report tells how many bytes there are to load, so the bar is made then.
    """

    def __init__(self) -> None:
        self._bars = ExitStack()
        self._bar: ProgressBar | None = None

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        if self._bar is None:
            self._bar = self._bars.enter_context(ProgressBar("loading weights (MiB)", -(-bytes_total // MIB)))
        self._bar.update(-(-bytes_done // MIB))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bars.close()
