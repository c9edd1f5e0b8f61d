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
    """Messages of `quire chat` from piped standard input: lines; lines between triple quotes are joined."""
    held = ""
    for line in sys.stdin:
        held += line
        if not is_open(held):
            yield held
            held = ""
    if held:
        yield held


def is_open(text: str) -> bool:
    """True if a typed message has an unclosed triple quote."""
    return text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    text = text.strip("\n")
    bare = text.strip()
    if len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES):
        return bare[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def history_file() -> Path:
    """File of the input history, readable only by its owner. Raises OSError."""
    path = envs.state_directory() / "chat_history"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    return path


class Keyboard:
    """Terminal input. A paste is one message; Ctrl-C discards the input, Ctrl-D leaves.

    commands: command name -> help. options: command name -> words that may follow.
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
    if not sys.stdout.isatty():  # the answers go into a file; the prompt is shown on the terminal
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
