"""`python -m quire.cli.vllm serve MODEL ...`: the command line of `vllm serve` as it stands (docs/from-vllm.md)."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire import envs
from quire.cli.main import run_program
from quire.cli.parser import Parser, add_struct_flags, given, json_object, length, number_of
from quire.cli.serve import start
from quire.config.options import HELP as ENGINE_HELP
from quire.config.options import EngineOptions
from quire.config.vllm import FLAGS, GROUPS, OLDER, REFUSED, VERSION, VllmFlag, finish, translate
from quire.errors import ConfigError, UserError
from quire.server.settings import HELP as SERVER_HELP
from quire.server.settings import ServerSettings
from quire.utils.failures import one_line
from quire.utils.text_files import read_text_file

DEFAULT_HOST = "0.0.0.0"
"""vLLM listens on every address unless told otherwise, and its lines count on it."""
IN_VLLMS_PLACE = {"dialect": "vllm"}
"""Settings of a server that clients of vLLM call, unless the line has them."""
POSITIONAL = "model_tag"
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+\+?)(?:=(.*))?", re.DOTALL)
_NAME = re.compile(r"--[^=.]+")
_LEVEL = re.compile(r"-O=?([0-9])")


class Line(NamedTuple):
    """What a command line means: keywords of EngineOptions and of ServerSettings, and what has no effect."""

    options: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, as `quire` does."""
    return run_program("quire", _dispatch, sys.argv[1:] if arguments is None else arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "flags":
        print(flag_tables())
        return 0
    if not arguments or arguments[0] != "serve":
        wanted = f", not {arguments[0]!r}" if arguments else ""
        raise UserError(f"only vLLM's `serve` is available here{wanted}; `quire --help` lists Quire's own commands")
    line = read_line(arguments[1:])
    options = EngineOptions.from_keywords(line.options)
    settings = ServerSettings.from_keywords({**IN_VLLMS_PLACE, **line.settings})
    for note in line.notes:
        print(f"quire: note: {note}", file=sys.stderr)
    return start(options, settings)


def read_line(arguments: Sequence[str], parser: Parser | None = None) -> Line:
    """What stands behind `vllm serve`. parser: of `build_parser`, for callers with many lines.

    Raises UserError for what is wrong or refused, with the reason."""
    parser = parser or build_parser()
    namespace = parse_flags(parser, arguments, _PREFIX)
    path = getattr(namespace, "config", None)
    values = {**({} if path is None else vars(parse_flags(parser, config_arguments(path), _PREFIX))), **vars(namespace)}
    merged = argparse.Namespace(**values)
    options, settings = given(merged, EngineOptions), given(merged, ServerSettings)
    notes = []
    for name, value in values.items():
        entry = FLAGS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if entry is None:
            continue
        more, note = translate(entry, value, entry.flag)
        notes += [] if note is None else [note]
        for target, ours in more.items():
            if ours is not None or target in UNBOUNDED:
                (settings if target in ServerSettings.__struct_fields__ else options)[target] = ours
    if values.get(POSITIONAL) is not None:
        options["model"] = values[POSITIONAL]
    if not settings.keys() & {"host", "uds"}:
        settings["host"] = DEFAULT_HOST
    key = envs.vllm_api_key() or envs.api_key()
    if key is not None and not settings.keys() & {"api_key", "api_key_file"}:
        settings["api_key"] = [key]
    return Line(finish(options), settings, notes)


UNBOUNDED = ("max_num_queued",)
"""Settings that None lifts; elsewhere None asks for the default."""
_PREFIX = "vllm:"


def build_parser() -> Parser:
    """vLLM's flags, and Quire's own where vLLM has none of that name."""
    parser = Parser(
        prog="quire.cli.vllm serve",
        usage="python -m quire.cli.vllm serve [MODEL] [flags of vllm serve]",
        description=f"Serve a model by the command line of vLLM {VERSION} (docs/from-vllm.md).",
        conflict_handler="resolve",
    )
    parser.add_argument(POSITIONAL, nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of flags")
    add_struct_flags(parser, EngineOptions, ENGINE_HELP, title="Quire's engine options")
    add_struct_flags(parser, ServerSettings, SERVER_HELP, title="Quire's server options")
    add_flags(parser, FLAGS.values(), _PREFIX)
    return parser


def add_flags(parser: argparse.ArgumentParser, entries: Iterable[VllmFlag], prefix: str = "") -> None:
    """Add flags of the table, whose values come under their names behind `prefix`; only those that are given."""
    group = parser.add_argument_group(f"flags of vLLM {VERSION}")
    for entry in entries:
        group.add_argument(
            *entry.short,
            entry.flag,
            dest=prefix + entry.name,
            default=argparse.SUPPRESS,
            help=f"{entry.fate}{': ' if entry.why else ''}{entry.why}".replace("%", "%%"),
            **_action(entry),
        )


class _Flag(argparse.BooleanOptionalAction):
    """--x, --no-x, and for --enable-x also --disable-x, for --disable-x also --enable-x."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._negative = tuple(text for text in map(_opposite, option_strings) if text is not None)
        self.option_strings = [*self.option_strings, *self._negative]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string in self._negative:
            setattr(namespace, self.dest, False)
        else:
            super().__call__(parser, namespace, values, option_string)


def _opposite(flag: str) -> str | None:
    """The flag that turns `flag` off, unless it is another one of the table."""
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(one):
            found = other + flag.removeprefix(one)
            return None if found.removeprefix("--").replace("-", "_") in FLAGS else found
    return None


def _action(entry: VllmFlag) -> dict[str, Any]:
    """Keyword arguments of add_argument for a flag's values."""
    kinds: Mapping[str, dict[str, Any]] = {
        "flag": {"action": _Flag},
        "int": {"type": _or_none(int), "metavar": "N"},
        "float": {"type": _or_none(float), "metavar": "X"},
        "text": {"type": _or_none(str), "metavar": "TEXT"},
        "count": {"type": _or_none(number_of), "metavar": "N"},
        "length": {"type": length, "metavar": "N"},
        "texts": {"nargs": "+", "metavar": "TEXT"},
        "ints": {"nargs": "+", "type": int, "metavar": "N"},
        "appended": {"action": "append", "metavar": "TEXT"},
        "json": {"type": _or_none(json_object), "metavar": "JSON"},
        "json list": {"type": _json_list, "metavar": "JSON"},
        "any": {"nargs": "?", "const": True, "metavar": "TEXT"},
    }
    return kinds[entry.kind]


def _or_none(kind: Any) -> Any:
    """vLLM writes None as an empty text or as "None"."""

    def parse(text: str) -> Any:
        return None if text in ("", "None") else kind(text)

    parse.__name__ = kind.__name__
    return parse


def _json_list(text: str) -> list[str]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(text)
    return value


_json_list.__name__ = "JSON list of strings"


def parse_flags(parser: Parser, arguments: Sequence[str], prefix: str = "") -> argparse.Namespace:
    """Parse a line with all that vLLM allows in it: underscores, `-O3`, keys of JSON values as flags of their own.
    prefix: as for `add_flags`. Raises UserError."""
    plain: list[str] = []
    keyed: dict[str, dict[str, Any]] = {}
    rest = [_whole(part, parser) for argument in arguments for part in _spelled(argument)]
    while rest:
        argument = rest.pop(0)
        dotted = _DOTTED.fullmatch(argument)
        entry = None if dotted is None else _json_flag(dotted[1])
        if dotted is None or entry is None:
            plain.append(argument)
            continue
        if dotted[3] is None and (not rest or rest[0].startswith("--")):
            raise UserError(f"{argument} needs a value")
        text = rest.pop(0) if dotted[3] is None else dotted[3]
        _set_key(keyed.setdefault(prefix + entry.name, {}), dotted[2].split("."), _value(text))
    namespace = parser.parse(plain)
    for name, keys in keyed.items():
        setattr(namespace, name, _merge(getattr(namespace, name, None) or {}, keys))
    return namespace


def _spelled(argument: str) -> list[str]:
    """An argument with hyphens in the flag's name, and a level of optimisation as a flag with its value."""
    if argument == "-O":
        return ["--optimization-level"]
    if (level := _LEVEL.fullmatch(argument)) is not None:
        return ["--optimization-level", level[1]]
    if argument.startswith("-O."):
        return ["-cc" + argument[2:]]
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        head, dot, keys = name.partition(".")
        return [head.replace("_", "-") + dot + keys + equals + value]
    return [argument]


def _whole(argument: str, parser: Parser) -> str:
    """An argument with the whole name of the flag that it begins. vLLM's flags count before those that only Quire has
    or that older versions of vLLM had, so that what is clear to vLLM is clear here. Raises UserError for a beginning
    of several flags."""
    head = _NAME.match(argument)
    known = parser.known_flags
    if head is None or head[0] in known:
        return argument
    found = [flag for flag in known if flag.startswith(head[0])]
    found = [flag for flag in found if flag in current_flags()] or found
    if len(found) > 1:
        raise UserError(f"ambiguous option: {head[0]} could match {', '.join(sorted(found))}")
    return found[0] + argument[head.end() :] if found else argument


@functools.cache
def current_flags() -> frozenset[str]:
    """The flags that vLLM itself has, with those that turn one off."""
    entries = [entry for entry in FLAGS.values() if entry not in OLDER]
    negative = ["--no-" + entry.flag[2:] for entry in entries if entry.kind == "flag"]
    return frozenset(["--config", "--help", *(entry.flag for entry in entries), *negative])


def _json_flag(flag: str) -> VllmFlag | None:
    found = next((entry for entry in FLAGS.values() if flag == entry.flag or flag in entry.short), None)
    return found if found is not None and found.kind == "json" else None


def _value(text: str) -> Any:
    """JSON where it is, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set_key(found: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Write found[a][b] of the path a.b; a name that ends in + adds to a list."""
    *outer, last = path
    for name in outer:
        found = found.setdefault(name, {})
    if last.endswith("+"):
        found.setdefault(last[:-1], []).append(value)
    else:
        found[last] = value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merge(below[name], value) if isinstance(below.get(name), dict) and isinstance(value, dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


def config_arguments(path: str) -> list[str]:
    """The flags that a YAML file holds, as a command line. Raises ConfigError for a file that is none."""
    import yaml  # a tenth of a second that lines without a file need not wait for

    if Path(path).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"config: {path} must end in .yaml or .yml", param="config")
    text = read_text_file(path, param="config")
    try:
        content = yaml.safe_load(text)
        is_mapping = isinstance(content, dict) and all(isinstance(name, str) for name in content)
        arguments = [word for entry in content.items() for word in _config_entry(*entry)] if is_mapping else None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        # PyYAML raises what its conversions meet: dates, endless numbers, aliases, tags that do not fit the value.
        raise ConfigError(f"config: {path} is not valid YAML: {one_line(str(error))}", param="config") from None
    if arguments is None:
        raise ConfigError(f"config: {path} must map flags to values", param="config")
    return arguments


def _config_entry(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    entry = FLAGS.get(name.replace("-", "_"))
    if name == "model_tag":
        flag = "--model"
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag[2:]]
    if isinstance(value, dict) or (entry is not None and entry.kind == "json list"):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        repeated = entry is None or entry.kind == "appended"
        return [part for each in value for part in (flag, str(each))] if repeated else [flag, *map(str, value)]
    return [flag, "None" if value is None else str(value)]


def flag_tables() -> str:
    """What becomes of each flag, as the tables of docs/from-vllm.md."""
    parts = []
    for title, group in GROUPS.items():
        rows = [f"| {_names(entry)} | {entry.fate} | {_meaning(entry)} |" for entry in group]
        parts.append("\n".join([f"### {title}", "", "| flag | here | what it does |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _names(entry: VllmFlag) -> str:
    return ", ".join(f"`{name}`" for name in (entry.flag, *entry.short))


def _meaning(entry: VllmFlag) -> str:
    parts = []
    if entry.target is not None and entry.target != entry.name:
        parts.append(f"`--{entry.target.replace('_', '-')}`")
    if entry.values:
        parts.append(", ".join(f"`{_word(theirs)}` is `{_word(ours)}`" for theirs, ours in entry.values.items()))
    if entry.known is not None:
        parts.append(f"{', '.join(f'`{each}`' for each in entry.known)} are taken")
    if entry.why:
        parts.append(entry.why)
    if entry.harmless and entry.fate == REFUSED:
        parts.append(f"without effect: {', '.join(f'`{_word(each)}`' for each in entry.harmless)}")
    return "; ".join(parts).replace("|", "\\|")


def _word(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
