"""The first lines of the engine process: its failures become one line in the runtime directory, which its parent reads.

Imports next to nothing before it is ready to report: what fails first, where files or memory are short, is an import.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from quire.utils.runtime_directory import LAST_WORDS_FILE


def main() -> None:
    """Run the engine process; its first line of input names the directory."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it had said what to do
    try:
        from quire.engine.process import main as run

        run(line)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a native extension's panic included; the parent's last line says why
        logging.getLogger("quire.engine").debug("the engine process failed", exc_info=True)
        _leave_word(Path(json.loads(line)["directory"]), error)
        os._exit(1)


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
