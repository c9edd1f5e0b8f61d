"""`quire`: imports and runs one command; prints every error as one clear line."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from quire.errors import QuireError, UserError, is_interrupt, nearest_name
from quire.logging import configure_logging, get_logger
from quire.utils.failures import explain, one_line
from quire.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("quire.cli.serve", "serve a model over HTTP, compatible with OpenAI's API"),
    "run-batch": ("quire.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "run": ("quire.cli.run", "complete one prompt, streamed to the terminal"),
    "chat": ("quire.cli.chat", "a conversation in the terminal"),
    "bench": ("quire.cli.bench", "measure: latency, throughput, any OpenAI-compatible server"),
    "simulate": ("quire.cli.simulate", "serve a trace on simulated devices: latencies, throughput, memory"),
    "quantize": ("quire.cli.quantize", "make a GGUF file of a Hugging Face directory"),
    "plan": ("quire.cli.plan", "what a model needs: memory, KV blocks, concurrency, predicted speed"),
    "doctor": ("quire.cli.doctor", "what would compute here, how and why, and what is wrong"),
    "top": ("quire.cli.top", "live view of a server: KV blocks, requests, rates"),
    "completion": ("quire.cli.completion", "a script by which bash, zsh or fish completes commands and flags"),
}

EXIT_ENGINE_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 (engine error), 2 (wrong use) or 130 (interrupted)."""
    return run_program("quire", _dispatch, sys.argv[1:] if arguments is None else arguments)


def run_program(name: str, program: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run `program` like `main`. name: beginning of each error line on stderr."""
    try:
        configure_logging()
        status = program(list(arguments))
        sys.stdout.flush()
        return status
    except SystemExit as leave:  # argparse after --help
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except QuireError as error:
        return _report(name, error, str(error))
    except BaseException as error:  # a system limit or a bug: one line as well
        if is_interrupt(error):
            raise
        return _report(name, error, explain(error))


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] in ("-V", "--version"):
        print(f"quire {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = [*COMMANDS, "--help", "--version"]
        raise UserError(f"unknown {kind} {name!r}{nearest_name(name, known)} (commands: {', '.join(COMMANDS)})")
    module, _ = COMMANDS[name]
    return int(importlib.import_module(module).main(arguments[1:]))


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire COMMAND [options]",
            "",
            "An LLM inference and serving engine built on PagedAttention.",
            "",
            "commands:",
            *lines,
            "",
            "Without a model every command uses the small one in the package, so none needs a download.",
            "`quire COMMAND --help` lists a command's options; `quire --version` prints the version.",
        ]
    )


def _report(name: str, error: BaseException, message: str) -> int:
    if get_logger("quire").isEnabledFor(logging.DEBUG):
        import traceback

        traceback.print_exception(error)
    elif not isinstance(error, QuireError):
        message = f"{message} (QUIRE_LOG_LEVEL=DEBUG shows where)"
    print(f"{name}: error: {one_line(message)}", file=sys.stderr)
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ENGINE_ERROR


if __name__ == "__main__":
    sys.exit(main())
