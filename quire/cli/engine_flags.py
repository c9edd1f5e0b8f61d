from __future__ import annotations

import argparse
from collections.abc import Iterable

from quire.cli.parser import Parser, add_struct_flags, given
from quire.config.options import EngineOptions
from quire.errors import UserError

_POSITIONAL = "model_positional"


def add_engine_flags(parser: Parser, *, positional: bool = True, skip: Iterable[str] = ()) -> None:
    """Add a flag for each field of EngineOptions. positional: MODEL may also be the first argument."""
    if positional:
        parser.add_argument(
            _POSITIONAL, metavar="MODEL", nargs="?", default=None, help="the same as --model (default: bundled)"
        )
    add_struct_flags(parser, EngineOptions, title="engine options", skip=skip)


def engine_options(namespace: argparse.Namespace) -> EngineOptions:
    """Options from the given flags. Raises UserError if MODEL and --model disagree."""
    keywords = given(namespace, EngineOptions)
    model = getattr(namespace, _POSITIONAL, None)
    if model is not None:
        if keywords.get("model", model) != model:
            raise UserError(f"MODEL is {model!r} but --model is {keywords['model']!r}: give one", param="model")
        keywords["model"] = model
    return EngineOptions.from_keywords(keywords)
