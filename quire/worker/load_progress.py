"""Progress of loading weights, in MiB: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from quire.utils.progress import ProgressBar, ProgressLog

MIB = 2**20
DESCRIPTION = "loading weights (MiB)"


class LoadProgress:
    """Progress bar of weight loading: callback of `load_model`, and context manager. The first report says the
    total."""

    def __init__(self) -> None:
        self._bars = ExitStack()
        self._bar: ProgressBar | None = None
        self._log: ProgressLog | None = None

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        done, total = -(-bytes_done // MIB), -(-bytes_total // MIB)
        if self._bar is None or self._log is None:
            self._bar = self._bars.enter_context(ProgressBar(DESCRIPTION, total))
            self._log = ProgressLog(DESCRIPTION, total)
        self._bar.update(done)
        self._log.update(done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bars.close()
