from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TypeVar

from quire.cli.parser import Parser
from quire.cli.vllm import add_flags, parse_flags
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.config.vllm import FLAGS
from quire.errors import UserError

ParserT = TypeVar("ParserT", bound=argparse.ArgumentParser)


class EngineArgs(SimpleNamespace):
    """Keywords of `LLM` and `AsyncLLM`, Quire's or vLLM's, as attributes. Checked when an engine is made."""

    def __init__(self, model: str = BUNDLED_MODEL, **keywords: Any) -> None:
        super().__init__(model=model, **keywords)

    def to_options(self) -> EngineOptions:
        """Convert to options. Raises ConfigError for unknown, invalid or refused keywords."""
        return EngineOptions.from_keywords(dict(vars(self)))

    @staticmethod
    def add_cli_args(parser: ParserT) -> ParserT:
        """Add vLLM's engine flags."""
        add_flags(parser, [entry for entry in FLAGS.values() if entry.is_keyword])
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        return cls(**{name: value for name, value in vars(arguments).items() if name in FLAGS})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for programs with `AsyncLLM`."""


class FlexibleArgumentParser(Parser):
    """Parser for programs, with vLLM's spelling: hyphens or underscores, and keys of JSON values as flags."""

    def parse_args(  # type: ignore[override]  # argparse's takes a namespace of the caller's type
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        try:
            return parse_flags(self, sys.argv[1:] if args is None else args)
        except UserError as error:
            argparse.ArgumentParser.error(self, str(error))

    def error(self, message: str) -> NoReturn:
        raise UserError(message)
