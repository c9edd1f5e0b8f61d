"""Entry point of the engine process. A failed start leaves a line in the runtime directory for the parent."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.utils.runtime_directory import LAST_WORDS_FILE


def main() -> None:
    """Run the engine process. stdin: a line with the modules to import, then the LaunchSpec, which names the
    directory."""
    first = sys.stdin.buffer.readline()
    failed = _prepare(json.loads(first)) if first.endswith(b"\n") else None
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it sent the LaunchSpec
    try:
        if failed is not None:
            raise failed
        from quire.engine.process import main as run

        run(line)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also a native extension's panic; the parent reports the reason
        logging.getLogger("quire.engine").debug("the engine process failed", exc_info=True)
        _leave_word(Path(json.loads(line)["directory"]), error)
        os._exit(1)


def _prepare(modules: Sequence[str]) -> BaseException | None:
    gc.disable()
    try:
        for module in ("quire.engine.process", *modules):
            importlib.import_module(module)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    finally:
        gc.freeze()
        gc.enable()
    return None


def _leave_word(directory: Path, error: BaseException) -> None:
    try:
        from quire.utils.failures import explain

        text = explain(error)
    except BaseException:  # not enough memory for that import, or a panic in it
        text = type(error).__name__
    try:
        (directory / LAST_WORDS_FILE).write_text(text)
    except OSError:
        print(f"quire: error: the engine process could not start: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
