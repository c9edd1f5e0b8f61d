"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from quire.cli.answers import SECONDS_WITHOUT_A_BYTE, AnswerSource, LocalAnswers, ServerAnswers
from quire.cli.connection_flags import add_connection_flags, connect
from quire.cli.conversation import COMMANDS, SETTINGS, UNUSED_FIELDS, ChatHistory
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.keyboard import Keyboard, messages_of_pipe, unquoted
from quire.cli.parser import Parser, given
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.screen import MarkdownScreen, PlainScreen, Screen
from quire.cli.session import session
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.errors import UserError
from quire.sampling_params import SamplingParams

DEFAULTS = {"max_tokens": 512, "temperature": 0.7}
MIN_NOTE_WIDTH = 20
HINT = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves"
BUNDLED_NOTE = "note: the bundled model completes Python code; it was not trained to chat"


def build_parser() -> Parser:
    parser = Parser(
        prog="quire chat",
        usage="quire chat [MODEL] [options]",
        description="A conversation with a model that has a chat template, in this process or of a server (--url). "
        f"{HINT}.",
    )
    group = parser.add_argument_group("chat options")
    group.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    group.add_argument("-q", "--question", metavar="TEXT", help="ask this alone, and leave")
    group.add_argument("--stats", action="store_true", help="print tokens and speed after each answer")
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="what splits thoughts from the answer (default: auto, by the chat template; none: nothing)",
    )
    group.add_argument("--url", metavar="URL", help="ask this server; MODEL is the name of one that it serves")
    add_connection_flags(group)
    add_sampling_flags(parser, DEFAULTS, skip=UNUSED_FIELDS)
    add_engine_flags(parser, skip=("seed",))
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    settings = {**DEFAULTS, **given(namespace, SamplingParams)}
    sampling_params(namespace, DEFAULTS)  # raises UserError before the model loads
    with _open_answers(namespace) as answers:
        answers.check()
        conversation = ChatHistory(
            answers, settings, namespace.system, screen=_screens(), note=_note, show_stats=namespace.stats
        )
        for text in _typed() if namespace.question is None else [namespace.question]:
            conversation.take(unquoted(text))
            if conversation.is_over:
                break
    return 0


@contextmanager
def _open_answers(namespace: argparse.Namespace) -> Iterator[AnswerSource]:
    options = engine_options(namespace)
    if namespace.url is None:
        if given_names := [name for name in ("api_key", "cacert", "insecure") if getattr(namespace, name)]:
            raise UserError(f"--{given_names[0].replace('_', '-')} belongs to --url", param=given_names[0])
        if options.model == BUNDLED_MODEL:
            _note(BUNDLED_NOTE)
        with session(options) as running:
            yield LocalAnswers(running, namespace.reasoning_parser or "auto")
        return
    of_engine = [name for name in given(namespace, EngineOptions) if name not in ("model", "seed")]
    if namespace.reasoning_parser is not None:
        of_engine.append("reasoning_parser")
    if of_engine:
        name = of_engine[0]
        raise UserError(f"--{name.replace('_', '-')} is for a model in this process, not for a server's", param=name)
    connection = connect(namespace, timeout=SECONDS_WITHOUT_A_BYTE)
    try:
        yield ServerAnswers(connection, None if options.model == BUNDLED_MODEL else options.model)
    finally:
        connection.close()


def _screens() -> Callable[[], AbstractContextManager[Screen]]:
    """Maker of an answer's screen: Markdown on a terminal, else plain text."""
    if not sys.stdout.isatty():
        return PlainScreen
    from rich.console import Console

    console = Console()
    return lambda: MarkdownScreen(console)


def _typed() -> Iterator[str]:
    if not sys.stdin.isatty():
        return messages_of_pipe()
    _note(HINT)
    commands = {name: command.help for name, command in COMMANDS.items()}
    return Keyboard(commands, {"/set": list(SETTINGS)}, _note).messages()


def _note(text: str) -> None:
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    width = max(MIN_NOTE_WIDTH, shutil.get_terminal_size().columns)
    lines = (textwrap.wrap(each, width, break_long_words=False, break_on_hyphens=False) for each in text.split("\n"))
    print("\n".join("\n".join(each) for each in lines), file=sys.stderr)
