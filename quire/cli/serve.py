"""`quire serve`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from quire import envs
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser, add_struct_flags, given
from quire.server.settings import HELP, ServerSettings


def build_parser() -> Parser:
    parser = Parser(
        prog="quire serve",
        usage="quire serve [MODEL] [--port N] [options]",
        description="Serve a model over HTTP, compatible with OpenAI's API.",
    )
    add_engine_flags(parser)
    add_struct_flags(parser, ServerSettings, HELP, title="server options")
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    options = engine_options(namespace)
    keywords = given(namespace, ServerSettings)
    key = envs.api_key()
    if key is not None and not keywords.keys() & {"api_key", "api_key_file"}:
        keywords["api_key"] = [key]
    settings = ServerSettings.from_keywords(keywords)
    from quire.server.run import serve  # after the options are known to be good: it imports the web framework

    return serve(options, settings)
