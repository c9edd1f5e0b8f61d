"""`quire serve` from its first moment: the engine's process imports torch while this one imports options and server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from quire.engine.engine_process import LOCAL_EXECUTOR, EngineProcess

STARTS_NOTHING = frozenset({"-h", "--help", "--print-config"})


def main(arguments: Sequence[str]) -> int:
    """Run `quire.cli.serve` with a waiting engine process, which ends unused if the options are wrong or ask for
    several engines."""
    with contextlib.ExitStack() as stack:
        process = None
        if not STARTS_NOTHING.intersection(word.partition("=")[0] for word in arguments):
            process = stack.enter_context(EngineProcess(imports=[LOCAL_EXECUTOR]))
        from quire.cli import serve  # its imports take a third of the time of torch's

        return serve.main(arguments, process)
