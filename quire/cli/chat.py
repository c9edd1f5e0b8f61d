"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.session import Session, session
from quire.config.options import BUNDLED_MODEL
from quire.errors import ModelOutputError, UserError
from quire.sampling_params import SamplingParams

DEFAULTS = {"max_tokens": 512, "temperature": 0.7}
UNUSED_FIELDS = (
    "n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "detokenize",
)  # fmt: skip
PROMPT = "> "
HELP = "/exit ends the conversation, /clear forgets it, /help shows this; Ctrl-C stops an answer"
BUNDLED_NOTE = "note: the bundled model completes Python code; it was not trained to chat"


def build_parser() -> Parser:
    parser = Parser(
        prog="quire chat",
        usage="quire chat [MODEL] [options]",
        description=f"A conversation with a model that has a chat template. {HELP}.",
    )
    group = parser.add_argument_group("chat options")
    group.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    group.add_argument("--stats", action="store_true", help="print tokens and speed after each answer")
    add_sampling_flags(parser, DEFAULTS, skip=UNUSED_FIELDS)
    add_engine_flags(parser, skip=("seed",))
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    params = sampling_params(namespace, DEFAULTS)
    options = engine_options(namespace)
    with session(options) as engine:
        conversation = Conversation(engine, params, namespace.system, show_stats=namespace.stats)
        conversation.check_template()
        if options.model == BUNDLED_MODEL:
            _note(BUNDLED_NOTE)
        if sys.stdin.isatty():
            _note(HELP)
        for line in _lines():
            if not conversation.take(line):
                break
    return 0


class Conversation:
    """The history, and what each typed line does to it."""

    def __init__(self, engine: Session, params: SamplingParams, system: str | None, *, show_stats: bool) -> None:
        self._session = engine
        self._params = params
        self._opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._show_stats = show_stats
        self.messages = list(self._opening)

    def check_template(self) -> None:
        """Raise UserError now, not after the first question, when the model has no chat template."""
        self._session.engine.render_chat([{"role": "user", "content": "hello"}])

    def take(self, line: str) -> bool:
        """Answer a line or obey a command; False ends the conversation."""
        line = line.strip()
        if line == "/exit":
            return False
        if line == "/clear":
            self.messages = list(self._opening)
        elif line == "/help":
            _note(HELP)
        elif line.startswith("/"):
            _note(f"unknown command {line.split()[0]} ({HELP})")
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        """Stream the answer. A refused question is forgotten; an interrupted answer is kept as far as it came."""
        messages = [*self.messages, {"role": "user", "content": question}]
        written: list[str] = []
        try:
            chat = self._session.engine.render_chat(messages)
            prompt = {"prompt_token_ids": chat.token_ids, "prompt": chat.text}
            timing = self._session.stream(prompt, self._params, written)
        except UserError as error:
            _note(f"refused: {error}")
            return
        except ModelOutputError as error:
            print()
            _note(f"no answer: {error}")
            return
        except KeyboardInterrupt:
            timing = None
        print()
        self.messages = [*messages, {"role": "assistant", "content": "".join(written)}]
        if self._show_stats and timing is not None:
            _note(timing.line())


def _lines() -> Iterator[str]:
    """Typed lines (with editing and history where the system has readline), or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    try:
        importlib.import_module("readline")  # importing it is what makes input() edit lines
    except ImportError:
        _note("no line editing: this Python has no readline")
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


def _note(text: str) -> None:
    print(text, file=sys.stderr)
