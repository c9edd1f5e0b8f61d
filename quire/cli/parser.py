"""Command-line flags from typed structs, and a parser whose errors are one clear line."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import msgspec

from quire.config.option import Option, OptionGroup, options_of
from quire.errors import UserError, nearest_name
from quire.utils.sizes import parse_count, parse_length

T = TypeVar("T")


class _HelpOfGroup(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_help() if values is None else parser.format_help_of(values), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, which raises UserError (with the nearest option) and never exits.

    groups: those of --help, in order; --help=NAME shows one, or the options with NAME in their names.
    """

    def __init__(self, *, groups: Sequence[OptionGroup] = (), **keywords: Any) -> None:
        keywords.setdefault("add_help", not groups)
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        if groups:
            text = "show all options, those of a group, or those with WORD in their names: --help=kv"
            self.add_argument("-h", "--help", action=_HelpOfGroup, nargs="?", metavar="WORD", help=text)
        for name, title in groups:
            self._groups[name] = self.add_argument_group(f"{name}: {title}")

    def group_of(self, option: Option | None, title: str) -> argparse._ArgumentGroup:
        """Group of an option; without own groups, the one with this title. Raises LookupError for an option in no
        group."""
        if self._groups:
            assert option is not None, "each option of a command with groups has a record"
            return self._groups[option.group.name]
        found = next((group for group in self._action_groups if group.title == title), None)
        return found or self.add_argument_group(title)

    def action_of(self, flag: str) -> argparse.Action | None:
        return self._option_string_actions.get(flag)

    def format_help_of(self, word: str) -> str:
        """Help of a group, or of the options with the word in their names. Raises UserError if none."""
        formatter = self._get_formatter()
        if word in self._groups:
            found = [self._groups[word]]
            formatter.start_section(found[0].title)
            formatter.add_arguments(found[0]._group_actions)
        else:
            wanted = word.strip("-").replace("_", "-")
            actions = [each for each in self._actions if any(wanted in flag for flag in each.option_strings)]
            if not actions:
                names = ", ".join(self._groups)
                raise UserError(f"{self.prog}: no group and no option has {word!r} in its name (groups: {names})")
            formatter.start_section(f"options with {word} in their names")
            formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    @property
    def known_flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse arguments. Raises UserError for unknown ones."""
        namespace, surplus = self.parse_known_args(list(arguments))
        if surplus:
            first = surplus[0].partition("=")[0]
            if not first.startswith("-"):
                raise UserError(f"{self.prog}: unexpected argument {first!r}")
            nearest = nearest_name(first, self._option_string_actions)
            raise UserError(f"{self.prog}: unknown option {first!r}{nearest}{_of_vllm(first)}")
        return namespace


def _of_vllm(flag: str) -> str:
    from quire.config.vllm import FLAGS  # loaded only for a mistake on the line

    if flag.removeprefix("--").removeprefix("no-").replace("-", "_") not in FLAGS:
        return ""
    return "; it is a flag of vLLM, whose lines `python -m quire.cli.vllm serve` takes (docs/from-vllm.md)"


def add_struct_flags(
    parser: Parser,
    struct: type[msgspec.Struct],
    help_lines: Mapping[str, str] = MappingProxyType({}),
    *,
    title: str,
    skip: Iterable[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add a --kebab-case flag for each field of `struct` except `skip`; only given flags are stored. help_lines: help
    of fields without a record (Option). title: heading without groups. defaults: command's own, for the help. By
    annotation, bool becomes --x/--no-x, a list may be repeated, a mapping is KEY=VALUE with commas (JSON for text
    keys), and `none` means None."""
    annotations, options = typing.get_type_hints(struct), options_of(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in skip:
            continue
        default = defaults.get(field.name, field.default)
        shown = "" if default is None or default is msgspec.NODEFAULT else f" (default: {default})"
        option = options.get(field.name)
        line = help_lines[field.name] if option is None else help_lines.get(field.name, option.help)
        text = (line + shown).replace("%", "%%")
        flags = ["--" + field.name.replace("_", "-")]
        action = _action(annotations[field.name])
        if option is not None:
            flags += option.flags
            if option.reads is not None:
                action["type"] = READERS[option.reads]
        group = parser.group_of(option, title)
        group.add_argument(*flags, dest=field.name, help=text, default=argparse.SUPPRESS, **action)


def given(namespace: argparse.Namespace, struct: type[msgspec.Struct], skip: Iterable[str] = ()) -> dict[str, Any]:
    names = [name for name in struct.__struct_fields__ if name not in skip]
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def _action(annotation: Any) -> dict[str, Any]:
    choices = list(typing.get_args(annotation)) if _is_union(annotation) else [annotation]
    optional = types.NoneType in choices
    kinds = [kind for kind in choices if kind is not types.NoneType]
    lists = [kind for kind in kinds if typing.get_origin(kind) is list]
    if typing.get_origin(kinds[0]) is typing.Literal:
        return {"choices": list(typing.get_args(kinds[0]))}
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if lists:
        (item,) = typing.get_args(lists[0])
        if item is int:
            return {"action": "extend", "type": integers, "metavar": "ID,ID"}
        return {"action": "append", "type": item, "metavar": "TEXT"}
    if typing.get_origin(kinds[0]) is dict:
        if typing.get_args(kinds[0])[0] is str:
            return {"type": json_object, "metavar": "JSON"}
        return {"type": id_values, "metavar": "ID=VALUE,..."}
    if bool in kinds and str in kinds:
        return {"type": _truth_or_text, "metavar": "TEXT"}
    kind = str if str in kinds else kinds[0]
    metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    return {"type": _optional(kind) if optional and kind is not str else kind, "metavar": metavar}


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _optional(kind: Callable[[str], T]) -> Callable[[str], T | None]:
    def parse(text: str) -> T | None:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = getattr(kind, "__name__", "value")
    return parse


def _truth_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def id_values(text: str) -> dict[int, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {int(key): float(value) for key, _, value in pairs}


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def number_of(text: str) -> int:
    """Integer of 4096, 4k (4000) or 4K (4096)."""
    return parse_count(text, param="the number")


def length(text: str) -> int | None:
    """Tokens as in `number_of`; None (maximum) for auto, -1 and none."""
    return None if text.lower() == "none" else parse_length(text, param="the length")


READERS: Mapping[Callable[..., Any], Callable[[str], Any]] = {parse_length: length, parse_count: number_of}
"""`Option.reads` -> the same for an argument."""

json_object.__name__ = "JSON object"
number_of.__name__ = "int"
length.__name__ = "int"
integers.__name__ = "list of integers"
id_values.__name__ = "ID=VALUE list"
