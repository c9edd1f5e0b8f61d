"""`quire run-batch`: answers a file of requests."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser, add_struct_flags, given
from quire.config.options import EngineOptions
from quire.errors import UserError
from quire.server.batch_lines import AnsweredLine, read_answered, unanswered
from quire.server.listener import Listener, bind
from quire.server.settings import ServerSettings
from quire.utils.progress import ProgressBar

OF_THE_API = (
    "served_model_name",
    "chat_template_content_format",
    "strict_fields",
    "max_body_size",
    "default_chat_template_kwargs",
    "max_stored_responses",
    "response_store_size",
    "response_role",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
    "exclude_tools_when_tool_choice_none",
)
"""Server settings that affect answers; the others concern clients."""
OF_METRICS = ("host", "port", "allowed_hosts", "metrics_names")
MIN_CONCURRENCY = 64


def build_parser() -> Parser:
    parser = Parser(
        prog="quire run-batch",
        usage="quire run-batch IN.jsonl OUT.jsonl [--model MODEL] [options]",
        description="Answer a file of requests in OpenAI's batch format, one line each, in order.",
    )
    parser.add_argument("files", nargs="*", metavar="IN OUT", help="the same as -i IN -o OUT")
    add_batch_flags(parser)
    add_engine_flags(parser, positional=False)
    for title, names in (("options of the API", OF_THE_API), ("options of --enable-metrics", OF_METRICS)):
        others = [name for name in ServerSettings.__struct_fields__ if name not in names]
        add_struct_flags(parser, ServerSettings, title=title, skip=others)
    return parser


def add_batch_flags(parser: Parser) -> None:
    parser.add_argument("-i", "--input-file", metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="answers, one JSON object a line")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help=f"requests that are answered at a time (default: 4 x max_num_seqs, at least {MIN_CONCURRENCY})",
    )
    parser.add_argument("--resume", action="store_true", help="go on behind the answers that OUT has")
    parser.add_argument("--enable-metrics", action="store_true", help="serve /metrics on --host and --port meanwhile")


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    return answer_file(namespace, engine_options(namespace), given(namespace, ServerSettings))


def answer_file(namespace: argparse.Namespace, options: EngineOptions, keywords: dict[str, Any]) -> int:
    """Answer a file's requests; return the exit status. namespace: needs files, input_file, output_file,
    max_concurrency and enable_metrics. keywords: fields of ServerSettings. Raises UserError."""
    files = [*namespace.files, *(each for each in (namespace.input_file, namespace.output_file) if each is not None)]
    if len(files) != 2 or len(namespace.files) == 1:
        raise UserError(f"two files are required, IN and OUT or -i IN -o OUT, not {len(files)}")
    source, target = map(Path, files)
    for name, path in (("input_file", source), ("output_file", target)):
        if "://" in str(path) or str(path).startswith(("http:", "https:")):
            raise UserError(f"{name} must be a file: addresses are not fetched or posted to", param=name)
    if namespace.max_concurrency is not None and namespace.max_concurrency < 1:
        raise UserError("max_concurrency must be at least 1", param="max_concurrency")
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError("input_file and output_file are the same file", param="output_file")
    if target.is_file() and target.stat().st_size and not namespace.resume:
        raise UserError(f"output_file: {target} has content: --resume goes on behind it", param="output_file")
    if not namespace.enable_metrics and (without := sorted(keywords.keys() & {*OF_METRICS})):
        raise UserError(f"{', '.join(without)} is of the server of metrics: give --enable-metrics", param=without[0])
    settings = ServerSettings.from_keywords({**keywords, "max_num_queued": None})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(settings)) if namespace.enable_metrics else None
        requests = stack.enter_context(_opened(source, "rb", "input_file"))
        if requests.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError("input_file is UTF-16: a file of requests must be UTF-8", param="input_file")
        answered = _answered(target) if namespace.resume else []
        answers = stack.enter_context(_opened(target, "ab" if namespace.resume else "wb", "output_file"))
        total = sum(1 for line in requests if line.strip()) if requests.seekable() else None
        if total is not None:
            requests.seek(0)
        work = Files(unanswered(requests, answered), answers, answered, total)
        return asyncio.run(_run(options, settings, namespace.max_concurrency, work, listener))


class Files(NamedTuple):
    """Input of `quire run-batch`. requests: lines without answers. answered: lines of an earlier run. total: requests
    in the file, if known."""

    requests: Iterator[bytes]
    answers: BinaryIO
    answered: list[AnsweredLine]
    total: int | None


def _answered(path: Path) -> list[AnsweredLine]:
    try:
        return read_answered(path)
    except OSError as error:
        raise _cannot_open(path, error, "output_file") from None


async def _run(
    options: EngineOptions,
    settings: ServerSettings,
    concurrency: int | None,
    files: Files,
    listener: Listener | None,
) -> int:
    from quire.engine.async_engine import AsyncLLM  # slow to import: only once the options are valid
    from quire.server.app import create_app
    from quire.server.batch import Pace, run_batch
    from quire.server.metrics_server import serving_metrics

    engine = AsyncLLM.from_options(options)
    try:
        app = await asyncio.to_thread(create_app, engine, settings)
        started = time.monotonic()

        num_done = len(files.answered)

        def write(line: bytes) -> None:
            nonlocal num_done
            engine.check_health()  # else the line is no answer, and --resume asks again
            files.answers.write(line)
            files.answers.flush()
            num_done += 1
            bar.update(num_done)

        limit = concurrency or max(MIN_CONCURRENCY, 4 * engine.max_num_seqs)
        async with contextlib.AsyncExitStack() as stack:
            if listener is not None:
                await stack.enter_async_context(serving_metrics(app.state.context, settings, listener))
                sys.stderr.write(f"quire: metrics on {listener.url}/metrics\n")
            bar = stack.enter_context(ProgressBar("requests", files.total or 0, make=files.total is not None))
            seen = {each.custom_id for each in files.answered if each.custom_id is not None}
            counts = await run_batch(app, files.requests, write, pace=Pace(limit), custom_ids=seen)
        seconds = time.monotonic() - started
        sys.stderr.write(
            f"quire: {counts.total} requests in {seconds:.1f} s: {counts.num_answered} answered, "
            f"{counts.num_failed} failed{f', {len(seen)} were answered before' if seen else ''}\n"
        )
        return 1 if counts.num_malformed else 0
    finally:
        engine.shutdown()


def _opened(path: Path, mode: str, param: str) -> Any:
    try:
        return path.open(mode)
    except OSError as error:
        raise _cannot_open(path, error, param) from None


def _cannot_open(path: Path, error: OSError, param: str) -> UserError:
    return UserError(f"{param}: cannot open {path}: {error.strerror}", param=param)
