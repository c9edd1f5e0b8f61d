from __future__ import annotations

import base64
import json
import mimetypes
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from quire.cli.answers import AnswerSource, Message, ReplyPiece
from quire.cli.parser import Parser, given
from quire.cli.sampling_flags import add_sampling_flags
from quire.cli.screen import Screen
from quire.cli.session import Timing
from quire.errors import QuireError, UserError, nearest_name
from quire.sampling_params import SamplingParams
from quire.utils.text_files import read_text_file

UNUSED_FIELDS = (
    "n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "detokenize",
)  # fmt: skip
ROLES = ("system", "user", "assistant")
Note = Callable[[str], None]


class ChatCommand(NamedTuple):
    usage: str
    help: str
    run: Callable[[ChatHistory, str], None]


class ChatHistory:
    """History of a conversation, and handling of typed messages.

    settings: fields of SamplingParams. screen: makes the screen of an answer. note: shows any other line.
    """

    def __init__(
        self,
        answers: AnswerSource,
        settings: Mapping[str, Any],
        system: str | None,
        *,
        screen: Callable[[], AbstractContextManager[Screen]],
        note: Note,
        show_stats: bool,
    ) -> None:
        self._answers = answers
        self._screen = screen
        self._note = note
        self._show_stats = show_stats
        self._defaults = dict(settings)
        self._timing: Timing | None = None
        self._files: set[Path] = set()
        """Files of this conversation, which may be overwritten."""
        self.settings = dict(settings)
        self.system = system
        self.messages: list[Message] = []
        self._pictures: list[Message] = []
        """Picture parts of the user's next question (`/image`)."""
        self.is_over = False

    def take(self, text: str) -> None:
        """Answer a message or run a command. A blank before a slash sends it as a message."""
        if not text.strip():
            return
        if not text.startswith("/"):
            pictures, self._pictures = self._pictures, []
            content = [*pictures, {"type": "text", "text": text.strip()}] if pictures else text.strip()
            self._ask([*self.messages, {"role": "user", "content": content}])
            return
        name, _, argument = text.strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            hint = "(/help lists them; a blank before the slash sends it as a message)"
            self._note(f"unknown command {name}{nearest_name(name, COMMANDS)} {hint}")
            return
        try:
            command.run(self, argument.strip())
        except (QuireError, OSError) as error:
            self._note(f"{name}: {error}")

    def help(self, argument: str) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in COMMANDS.values():
            self._note(f"{command.usage:{width}}  {command.help}")
        self._note('""" begins and ends a message of several lines; Ctrl-C drops what is typed, or stops an answer')

    def leave(self, argument: str) -> None:
        self.is_over = True

    def clear(self, argument: str) -> None:
        self.messages, self._pictures = [], []

    def add_picture(self, argument: str) -> None:
        if not argument:
            raise UserError("name a file")
        path = Path(argument).expanduser()
        kind = mimetypes.guess_type(path.name)[0] or ""
        if not kind.startswith("image/"):
            raise UserError(f"{path.name} is no picture by its name")
        url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        self._pictures.append({"type": "image_url", "image_url": {"url": url}})
        self._note(f"{path.name} goes with the next message")

    def show_system(self, argument: str) -> None:
        if argument:
            self.system = None if argument == "none" else argument
        self._note("no system message" if self.system is None else f"system: {self.system}")

    def change_setting(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            for known, given_value in sorted(self.settings.items()):
                self._note(f"{known} {given_value}")
            return
        name = name.removeprefix("--").replace("-", "_")
        if name not in SETTINGS:
            raise UserError(f"no setting {name!r}{nearest_name(name, SETTINGS)} (known: {', '.join(SETTINGS)})")
        changed = {known: found for known, found in self.settings.items() if known != name}
        if value == "default":
            changed |= {known: found for known, found in self._defaults.items() if known == name}
        elif value:
            changed |= _read_setting(name, value)
        SamplingParams.from_options(changed)  # raises UserError
        if value:
            self.settings = changed
        self._note(f"{name} {self.settings.get(name, 'default')}")

    def save(self, argument: str) -> None:
        if not argument:
            raise UserError("name a file")
        path = Path(argument).expanduser().resolve()
        if path.exists() and path not in self._files:
            raise UserError(f"{path} exists, and is not a file of this conversation")
        settings = {**self.settings, **({} if self.system is None else {"system": self.system})}
        text = json.dumps([{"messages": self.messages, "settings": settings}], ensure_ascii=False, indent=1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        self._files.add(path)
        self._note(f"saved: {path}")

    def load(self, argument: str) -> None:
        if not argument:
            raise UserError("name a file")
        path = Path(argument).expanduser().resolve()
        messages, settings = read_conversation(read_text_file(str(path), param="file"))
        system = settings.pop("system", None) or None
        SamplingParams.from_options(settings)
        leading = [message["content"] for message in messages if message["role"] == "system"]
        self.messages = [message for message in messages if message["role"] != "system"]
        self.system = "\n".join(leading) or system
        self.settings = {**self._defaults, **settings}
        self._files.add(path)
        self._note(f"loaded: {len(self.messages)} messages")

    def undo(self, argument: str) -> None:
        self.messages = self._before_last_question()[:-1]
        self._note(f"{len(self.messages)} messages are left")

    def ask_again(self, argument: str) -> None:
        self._ask(self._before_last_question())

    def show_timing(self, argument: str) -> None:
        self._note("no answer yet" if self._timing is None else self._timing.line())

    def _before_last_question(self) -> list[Message]:
        last = max((place for place, each in enumerate(self.messages) if each["role"] == "user"), default=None)
        if last is None:
            raise UserError("there is no question yet")
        return self.messages[: last + 1]

    def _ask(self, messages: list[Message]) -> None:
        """Ask for the next answer, show and keep it. A refused question is dropped, an interrupted answer kept."""
        written: list[str] = []
        sent = messages if self.system is None else [{"role": "system", "content": self.system}, *messages]
        self._timing = None
        try:
            with self._screen() as screen:

                def write(piece: ReplyPiece) -> None:
                    written.append(piece.content)
                    screen.write(piece)

                self._timing = self._answers.ask(sent, self.settings, write)
        except UserError as error:
            self._note(f"refused: {error}")
            return
        except QuireError as error:
            self._note(f"no answer: {error}")
            return
        except KeyboardInterrupt:
            self._note("stopped")
        text = "".join(written)
        if text or self._timing is not None:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        if self._show_stats and self._timing is not None:
            self._note(self._timing.line())


COMMANDS: Mapping[str, ChatCommand] = {
    "/help": ChatCommand("/help", "shows this", ChatHistory.help),
    "/system": ChatCommand("/system [TEXT]", "sets the system message, or shows it; none: no such message",
                       ChatHistory.show_system),
    "/set": ChatCommand("/set [NAME [VALUE]]", "sets a sampling parameter, or shows them; VALUE default: as at start",
                    ChatHistory.change_setting),
    "/image": ChatCommand("/image FILE", "shows a picture with the next message", ChatHistory.add_picture),
    "/save": ChatCommand("/save FILE", "writes the conversation, for /load and the server's page", ChatHistory.save),
    "/load": ChatCommand("/load FILE", "goes on with a conversation out of a file", ChatHistory.load),
    "/regen": ChatCommand("/regen", "asks the last question again", ChatHistory.ask_again),
    "/undo": ChatCommand("/undo", "forgets the last question and its answer", ChatHistory.undo),
    "/clear": ChatCommand("/clear", "forgets all that was said", ChatHistory.clear),
    "/stats": ChatCommand("/stats", "tokens and speed of the last answer", ChatHistory.show_timing),
    "/exit": ChatCommand("/exit", "ends (as Ctrl-D does)", ChatHistory.leave),
}  # fmt: skip


def _setting_parser() -> Parser:
    parser = Parser(prog="/set", add_help=False)
    add_sampling_flags(parser, {}, skip=UNUSED_FIELDS)
    return parser


SETTINGS: tuple[str, ...] = tuple(
    flag.removeprefix("--").replace("-", "_") for flag in _setting_parser().known_flags if not flag.startswith("--no-")
)
"""Sampling options that `/set` changes in `quire chat`."""


def _read_setting(name: str, value: str) -> dict[str, Any]:
    flag = f"--{name.replace('_', '-')}"
    truth = {"true": flag, "false": f"--no-{flag.removeprefix('--')}"}
    parser = _setting_parser()
    is_switch = truth["false"] in parser.known_flags
    if is_switch and value not in truth:
        raise UserError(f"{name} is true or false, not {value!r}", param=name)
    return given(parser.parse([truth[value]] if is_switch else [f"{flag}={value}"]), SamplingParams)


def _is_with_pictures(content: object) -> bool:
    kinds = ("text", "image_url")
    return isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in kinds for part in content)


def read_conversation(text: str) -> tuple[list[Message], dict[str, Any]]:
    """Messages and settings of the first conversation in a file of `/save` or of the server's page; only sampling
    parameters are kept. Raises UserError for other text."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"the file is not JSON: {error}") from None
    first = found[0] if isinstance(found, list) and found else found
    messages = first.get("messages") if isinstance(first, dict) else None
    if not isinstance(messages, list):
        raise UserError("the file holds no conversation")
    read = []
    for message in messages:
        role, content = (message.get(name) if isinstance(message, dict) else None for name in ("role", "content"))
        if role not in ROLES or not (isinstance(content, str) or (role == "user" and _is_with_pictures(content))):
            raise UserError("the file holds a message that is no text of system, user or assistant")
        read.append({"role": role, "content": content})
    settings = first.get("settings")
    known = settings if isinstance(settings, dict) else {}
    return read, {name: value for name, value in known.items() if name in SETTINGS or name == "system"}
