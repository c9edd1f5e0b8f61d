"""What a user types: messages and commands, from a terminal or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import envs

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT, CONTINUED = "> ", "... "
QUOTES = '"""'


def messages_of_pipe() -> Iterator[str]:
    """The lines of the standard input; lines from one with an odd number of triple quotes to the next are one."""
    held = ""
    for line in sys.stdin:
        held += line
        if not is_open(held):
            yield held
            held = ""
    if held:
        yield held


def is_open(text: str) -> bool:
    """A triple quote in the text has no partner."""
    return text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """The message in a typed text: without the triple quotes around it."""
    text = text.strip("\n")
    bare = text.strip()
    if len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES):
        return bare[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def history_file() -> Path:
    """File of what was typed before, readable by its owner alone. Raises OSError where it cannot be made."""
    path = envs.state_directory() / "chat_history"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    return path


class Keyboard:
    """Typed messages. A paste is one message, a triple quote begins one of several lines, Ctrl-C drops what is typed,
    Ctrl-D leaves.

    commands: name of each command -> its help. options: name of each command -> words that may follow it.
    """

    def __init__(
        self, commands: Mapping[str, str], options: Mapping[str, list[str]], note: Callable[[str], None]
    ) -> None:
        self._session = _prompt_session(commands, options, _history(note))

    def messages(self) -> Iterator[str]:
        while True:
            try:
                yield self._session.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return


def _history(note: Callable[[str], None]) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        return FileHistory(str(history_file()))
    except OSError as error:
        note(f"what is typed is not kept: {error}")
        return InMemoryHistory()


def _prompt_session(
    commands: Mapping[str, str], options: Mapping[str, list[str]], history: History
) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import create_output

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            typed = document.text_before_cursor
            if not typed.startswith("/"):
                return
            name, space, argument = typed.partition(" ")
            if space:
                for word in options.get(name, ()):
                    if word.startswith(argument):
                        yield Completion(word, start_position=-len(argument))
                return
            for command, text in commands.items():
                if command.startswith(typed):
                    yield Completion(command, start_position=-len(typed), display_meta=text)

    keywords: dict[str, Any] = {}
    if not sys.stdout.isatty():  # the answers go into a file: what is typed is shown beside them
        keywords["output"] = create_output(stdout=sys.stderr)
    return PromptSession(
        PROMPT,
        history=history,
        completer=Commands(),
        complete_while_typing=True,
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        prompt_continuation=CONTINUED,
        reserve_space_for_menu=4,
        **keywords,
    )
