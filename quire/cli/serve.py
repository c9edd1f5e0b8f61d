"""`quire serve`: the HTTP server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire import envs
from quire.cli.config_file import parse_config, written
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser, add_struct_flags, given
from quire.config.adapters import RANKS
from quire.config.option import GROUPS
from quire.config.options import EngineOptions
from quire.engine.engine_process import LOCAL_EXECUTOR, EngineProcess
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from quire.config.adapter_files import FileScale


def build_parser() -> Parser:
    parser = Parser(
        prog="quire serve",
        usage="quire serve [MODEL] [--port N] [options]",
        description="Serve a model over HTTP, compatible with OpenAI's API.",
        groups=GROUPS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file of options; those in the line count more")
    parser.add_argument("--print-config", action="store_true", help="print the options that are set, as such a file")
    add_struct_flags(parser, ServerSettings, title="server options")
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    namespace = parser.parse(arguments)
    if namespace.config is not None:
        if namespace.model_positional is not None and not hasattr(namespace, "model"):
            namespace.model = namespace.model_positional  # overrides the file's
        namespace = argparse.Namespace(**{**vars(parse_config(namespace.config, parser)), **vars(namespace)})
    options = engine_options(namespace)
    keywords = given(namespace, ServerSettings)
    key = envs.api_key()
    if key is not None and not keywords.keys() & {"api_key", "api_key_file"}:
        keywords["api_key"] = [key]
    settings = ServerSettings.from_keywords(keywords)
    options = with_adapters(options, settings.lora_files, given(namespace, EngineOptions))
    if namespace.print_config:
        print(written({**given(namespace, EngineOptions), "model": options.model, **keywords}), end="")
        return 0
    return start(options, settings)


def with_adapters(options: EngineOptions, files: Sequence[FileScale], chosen: Collection[str]) -> EngineOptions:
    """Options with room for the adapters of `--lora`, except where `chosen`. Raises ModelLoadError."""
    if not files:
        return options
    from quire.config.adapter_files import read_config  # slow to import

    rank = max(read_config(Path(each.path).expanduser()).largest_rank for each in files)
    fitting = {
        "enable_lora": True,
        "max_loras": len(files),
        "max_lora_rank": next((each for each in RANKS if each >= max(rank, options.max_lora_rank)), RANKS[-1]),
    }
    return msgspec.structs.replace(options, **{name: to for name, to in fitting.items() if name not in chosen})


def start(options: EngineOptions, settings: ServerSettings) -> int:
    """Serve until a signal comes; see `quire.server.run.serve`. Returns the exit status."""
    with contextlib.ExitStack() as stack:
        process = None
        sizes = options.tensor_parallel_size, options.data_parallel_size, settings.api_server_count
        if sizes == (1, 1, 1) and not settings.restart_engine:
            process = stack.enter_context(EngineProcess(imports=[LOCAL_EXECUTOR]))
        from quire.server.run import serve  # slow to import: only once the options are valid

        return serve(options, settings, process=process)
