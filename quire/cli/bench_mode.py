"""Base of `quire bench` and of the programs in the benchmarks folder."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.parser import Parser


@dataclass(frozen=True, slots=True)
class Mode:
    """Subcommand of `quire bench` with its parser and function. arguments: rest of the usage line."""

    summary: str
    arguments: str
    description: str
    add_flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]

    def main(self, program: str, arguments: Sequence[str]) -> int:
        """Parse and run; return the exit status. program: command as typed, such as `quire bench latency`."""
        return self.run(self.build_parser(program).parse(arguments))

    def build_parser(self, program: str) -> Parser:
        parser = Parser(prog=program, usage=f"{program} {self.arguments}", description=self.description)
        self.add_flags(parser)
        return parser


def count_flag(group: Any, flag: str, default: int | None, text: str, *, minimum: int = 1) -> None:

    def parse(value: str) -> int:
        number = int(value)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {number}")
        return number

    parse.__name__ = "int"
    suffix = "" if default is None else f" ({default})"
    group.add_argument(flag, metavar="N", type=parse, default=default, help=text + suffix)


def json_flag(group: Any) -> None:
    group.add_argument("--json", metavar="FILE", type=Path, help="write the result there too")


def options_json(namespace: argparse.Namespace) -> dict[str, Any]:
    """Given options for the result file, without the API key."""
    hidden = ("json", "api_key")
    return {
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in vars(namespace).items()
        if name not in hidden
    }
