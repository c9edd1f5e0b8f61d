"""Entry point of the engine process. It writes a failed start as one line to the runtime directory for the parent. It
imports almost nothing itself: imports fail first when files or memory run short."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from quire.utils.runtime_directory import LAST_WORDS_FILE

_LIBRARY = "lib/libtorch_cpu.so"
"""The largest of a torch for CPUs: the system links it for 0.2 s, most of which no Python runs."""


def main() -> None:
    """Run the engine process. stdin: a line with the modules to import, then the LaunchSpec, which names the
    directory."""
    first = sys.stdin.buffer.readline()
    failed = _prepare(json.loads(first)) if first.endswith(b"\n") else None
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it had said what to do
    try:
        if failed is not None:
            raise failed
        from quire.engine.process import main as run

        run(line)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a native extension's panic included; the parent's last line says why
        logging.getLogger("quire.engine").debug("the engine process failed", exc_info=True)
        _leave_word(Path(json.loads(line)["directory"]), error)
        os._exit(1)


def _prepare(modules: Sequence[str]) -> BaseException | None:
    """Import the engine's modules, exempt from garbage collection; returns the error, if any."""
    gc.disable()
    try:
        if modules:
            _load_ahead()
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


def _load_ahead() -> None:
    """Load torch's library on a thread, beside the imports that come before torch's. Where that fails, so does the
    import, which says why."""
    found = importlib.util.find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        library = Path(folder, _LIBRARY)
        if library.is_file() and not library.with_name("libtorch_cuda.so").exists():  # before that torch loads others
            load = ctypes.CDLL(None).dlopen  # a call of a library: other threads run meanwhile
            load.restype = ctypes.c_void_p
            threading.Thread(target=load, args=(os.fsencode(library), os.RTLD_NOW), daemon=True).start()


def _leave_word(directory: Path, error: BaseException) -> None:
    try:
        from quire.utils.failures import explain

        text = explain(error)
    except BaseException:  # no room even for that module, or a panic in it
        text = type(error).__name__
    try:
        (directory / LAST_WORDS_FILE).write_text(text)
    except OSError:
        print(f"quire: error: the engine process could not start: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
