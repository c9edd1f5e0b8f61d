"""`quire completion bash|zsh|fish`: prints a static script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class CommandWords:
    """Command. text: one-line help. flags: spelling -> one-line help. values: flag, or "" for the first argument ->
    possible words."""

    text: str
    flags: Mapping[str, str]
    values: Mapping[str, tuple[str, ...]]


def build_parser() -> Parser:
    parser = Parser(
        prog="quire completion",
        usage="quire completion bash|zsh|fish",
        description="Print a script for a shell: source <(quire completion bash), or write it to a file that it reads.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser


def main(arguments: Sequence[str]) -> int:
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[build_parser().parse(arguments).shell]
    print(write(commands()), end="")
    return 0


def commands() -> dict[str, CommandWords]:
    """Commands by name, with the flags of those that have one parser."""
    from quire.cli.main import COMMANDS

    found = {}
    for name, (module, text) in COMMANDS.items():
        code = importlib.import_module(module)
        build = getattr(code, "build_parser", None)
        modes = {"": tuple(getattr(code, "MODES", ()))}
        found[name] = CommandWords(text, {}, modes) if build is None else _described(text, build())
    return found


def _described(text: str, parser: argparse.ArgumentParser) -> CommandWords:
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        line = (action.help or "").replace("%%", "%").partition("\n")[0]
        flags |= dict.fromkeys(action.option_strings, line)
        if action.choices is not None:
            words = tuple(str(choice) for choice in action.choices)
            values |= dict.fromkeys(action.option_strings or [""], words)
    return CommandWords(text, flags, values)


def _words(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _cases(found: Mapping[str, CommandWords]) -> list[str]:
    lines = []
    for name, command in found.items():
        for flag, values in command.values.items():
            if flag:
                lines.append(f"    {shlex.quote(f'{name}:{flag}')}) words={_words(values)} ;;")
        words = [*command.values.get("", ()), *command.flags]
        lines.append(f"    {name}:*) words={_words(words)} ;;")
    return lines


def _bash(found: Mapping[str, CommandWords]) -> str:
    return "\n".join(
        [
            "# Completes `quire` in bash; a word that is none of its own is a file's name.",
            "_quire() {",
            "  local current=${COMP_WORDS[COMP_CWORD]} words=",
            f'  [ "$COMP_CWORD" = 1 ] && words={_words([*found, "--help", "--version"])}',
            '  [ "$COMP_CWORD" = 1 ] || case "${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]}" in',
            *_cases(found),
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _quire quire",
            "",
        ]
    )


def _zsh(found: Mapping[str, CommandWords]) -> str:
    return "\n".join(
        [
            "#compdef quire",
            "# Completes `quire` in zsh; a word that is none of its own is a file's name.",
            "_quire() {",
            "  (( CURRENT == 2 )) && { compadd -- " + " ".join([*found, "--help", "--version"]) + "; return }",
            '  local words_before="${words[2]}:${words[CURRENT-1]}" words_found=',
            '  case "$words_before" in',
            *(line.replace(" words=", " words_found=") for line in _cases(found)),
            "  esac",
            "  compadd -- ${(s: :)words_found}",
            "  _files",
            "}",
            "compdef _quire quire",
            "",
        ]
    )


def _fish(found: Mapping[str, CommandWords]) -> str:
    lines = ["# Completes `quire` in fish."]
    for name, command in found.items():
        lines.append(f"complete -c quire -n __fish_use_subcommand -a {name} -d {_fish_text(command.text)}")
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        if first := command.values.get(""):
            lines.append(f"complete -c quire {condition} -a {_fish_text(' '.join(first))}")
        for flag, text in command.flags.items():
            kind = (
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"
            )
            values = command.values.get(flag)
            taken = "" if values is None else f" -x -a {_fish_text(' '.join(values))}"
            lines.append(f"complete -c quire {condition} {kind} -d {_fish_text(text)}{taken}")
    return "\n".join([*lines, ""])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
