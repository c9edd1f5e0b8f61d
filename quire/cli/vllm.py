"""`python -m quire.cli.vllm serve MODEL ...`: vLLM's command lines unchanged (docs/from-vllm.md)."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from quire import envs
from quire.cli.config_file import SECRETS, config_words
from quire.cli.main import EXIT_USER_ERROR, run_program
from quire.cli.parser import Parser, add_struct_flags, given, json_object, length, number_of
from quire.cli.serve import start
from quire.config.options import EngineOptions
from quire.config.vllm import FLAGS, GROUPS, OLDER, REFUSED, SPECULATION_KEYS, VERSION, VllmFlag, finish, translate
from quire.errors import UserError, nearest_name
from quire.server.settings import ServerSettings

DEFAULT_HOST = "0.0.0.0"
"""vLLM's default: all addresses."""
IN_VLLMS_PLACE = {"dialect": "vllm"}
"""Server settings whose default differs for a command line of vLLM."""
POSITIONAL = "model_tag"
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+\+?)(?:=(.*))?", re.DOTALL)
_NAME = re.compile(r"--[^=.]+")
_LEVEL = re.compile(r"-O=?([0-9])")


class Line(NamedTuple):
    """Meaning of a command line: keywords of EngineOptions and ServerSettings, and notes on flags without effect."""

    options: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program("quire", _dispatch, sys.argv[1:] if arguments is None else arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else EXIT_USER_ERROR
    name = arguments[0]
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise UserError(f"unknown command {name!r}{nearest_name(name, COMMANDS)} (commands: {known})")
    return COMMANDS[name][0](arguments[1:])


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([f"usage: python -m quire.cli.vllm COMMAND (as of vLLM {VERSION})", "", *lines])


def _flags(arguments: Sequence[str]) -> int:
    print(flag_tables())
    return 0


def _serve(arguments: Sequence[str]) -> int:
    line = read_line(arguments)
    options = EngineOptions.from_keywords(line.options)
    settings = ServerSettings.from_keywords({**IN_VLLMS_PLACE, **line.settings})
    _say(line.notes)
    return start(options, settings)


def _run_batch(arguments: Sequence[str]) -> int:
    from quire.cli.run_batch import OF_METRICS, OF_THE_API, add_batch_flags, answer_file

    parser = Parser(
        prog="quire.cli.vllm run-batch",
        usage="python -m quire.cli.vllm run-batch -i FILE -o FILE [flags of vllm serve]",
        description="Answer a file of requests in OpenAI's batch format. `serve --help` shows the model's flags.",
    )
    add_batch_flags(parser)
    parser.add_argument("--output-tmp-dir", metavar="DIR", help="no effect: answers are written as they come")
    namespace, rest = parser.parse_known_args(list(arguments))
    namespace.files = []
    line = read_line(rest)
    metrics = OF_METRICS if namespace.enable_metrics else ()
    used = {name: value for name, value in line.settings.items() if name in (*OF_THE_API, *metrics)}
    of_servers = set(line.settings) - set(used) - {"host", "api_key"}
    if of_servers:
        raise UserError(f"{min(of_servers)} is for a server, and not for a file of requests", param=min(of_servers))
    _say(line.notes)
    return answer_file(namespace, EngineOptions.from_keywords(line.options), {**IN_VLLMS_PLACE, **used})


def _chat(arguments: Sequence[str]) -> int:
    from quire.cli.chat import main as chat

    parser = _client_parser("chat", "A conversation with a server.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="a system message in front of the conversation")
    namespace = parser.parse(arguments)
    given_flags = {"--api-key": _key(namespace), "--system": namespace.system_prompt, "--question": namespace.quick}
    flags = [f"{flag}={value}" for flag, value in given_flags.items() if value is not None]
    model = [] if namespace.model_name is None else [namespace.model_name]
    return chat([*model, f"--url={_base(namespace.url)}", *flags])


def _complete(arguments: Sequence[str]) -> int:
    from quire.cli.answers import SECONDS_WITHOUT_A_BYTE, ServerAnswers
    from quire.cli.screen import visible
    from quire.utils.server_connection import ServerConnection

    parser = _client_parser("complete", "Texts that a server goes on with, one for each line that is typed.")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of each")
    namespace = parser.parse(arguments)
    settings = {} if namespace.max_tokens is None else {"max_tokens": namespace.max_tokens}
    show = visible if sys.stdout.isatty() else str
    connection = ServerConnection(_base(namespace.url), _key(namespace), timeout=SECONDS_WITHOUT_A_BYTE)
    try:
        answers = ServerAnswers(connection, namespace.model_name)
        answers.check()
        for text in sys.stdin if namespace.quick is None else [namespace.quick]:
            answers.complete(text.rstrip("\n"), settings, lambda piece: print(show(piece.content), end="", flush=True))
            print()
    finally:
        connection.close()
    return 0


def _client_parser(name: str, description: str) -> Parser:
    parser = Parser(prog=f"quire.cli.vllm {name}", description=description)
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"of the API (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", metavar="NAME", help="a model that it serves (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="default: VLLM_API_KEY, then QUIRE_API_KEY")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this alone, and leave")
    return parser


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _key(namespace: argparse.Namespace) -> str | None:
    return namespace.api_key or envs.vllm_api_key() or envs.api_key()


def _bench(arguments: Sequence[str]) -> int:
    from quire.cli.bench import main as bench

    return bench(arguments)


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"quire: note: {note}", file=sys.stderr)


COMMANDS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "serve": (_serve, "serve a model over HTTP"),
    "chat": (_chat, "a conversation with a server"),
    "complete": (_complete, "texts that a server goes on with"),
    "bench": (_bench, "the benchmarks of `quire bench`, with its flags: latency, throughput, serve"),
    "run-batch": (_run_batch, "answer a file of requests in OpenAI's batch format"),
    "flags": (_flags, "print what becomes of each flag of `serve`"),
}
DEFAULT_URL = "http://localhost:8000/v1"


def read_line(arguments: Sequence[str], parser: Parser | None = None) -> Line:
    """Parse the arguments of `vllm serve`. parser: result of `build_parser`, for repeated use. Raises UserError with
    the reason for invalid or refused flags."""
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
"""Settings where None means no limit; elsewhere it means the default."""
_PREFIX = "vllm:"


def build_parser() -> Parser:
    """Parser of vLLM's flags, and of Quire's other ones."""
    parser = Parser(
        prog="quire.cli.vllm serve",
        usage="python -m quire.cli.vllm serve [MODEL] [flags of vllm serve]",
        description=f"Serve a model by the command line of vLLM {VERSION} (docs/from-vllm.md).",
        conflict_handler="resolve",
    )
    parser.add_argument(POSITIONAL, nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of flags")
    add_struct_flags(parser, EngineOptions, title="Quire's engine options")
    add_struct_flags(parser, ServerSettings, title="Quire's server options")
    add_flags(parser, FLAGS.values(), _PREFIX)
    return parser


def add_flags(parser: argparse.ArgumentParser, entries: Iterable[VllmFlag], prefix: str = "") -> None:
    """Add vLLM's flags of the table. Given values are stored under `prefix` and the flag's name."""
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
    """Flag --x with --no-x; --enable-x and --disable-x negate each other."""

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
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(one):
            found = other + flag.removeprefix(one)
            return None if found.removeprefix("--").replace("-", "_") in FLAGS else found
    return None


def _action(entry: VllmFlag) -> dict[str, Any]:
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
    """Parse a line in all vLLM's spellings: underscores, `-O3`, keys of JSON values as flags. prefix: see `add_flags`.
    Raises UserError."""
    plain: list[str] = []
    keyed: dict[str, dict[str, Any]] = {}
    rest = [_as_key(_whole(part, parser)) for argument in arguments for part in _spelled(argument)]
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


def _as_key(argument: str) -> str:
    name, equals, value = argument.partition("=")
    key = SPECULATION_KEYS.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
    return argument if key is None else f"--speculative-config.{key}{equals}{value}"


def _whole(argument: str, parser: Parser) -> str:
    """Flag completed from an abbreviation, vLLM's current ones first. Raises UserError for an ambiguous flag."""
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
    """vLLM's current flags, with negations."""
    entries = [entry for entry in FLAGS.values() if entry not in OLDER]
    negative = ["--no-" + entry.flag[2:] for entry in entries if entry.kind == "flag"]
    return frozenset(["--config", "--help", *(entry.flag for entry in entries), *negative])


def _json_flag(flag: str) -> VllmFlag | None:
    found = next((entry for entry in FLAGS.values() if flag == entry.flag or flag in entry.short), None)
    return found if found is not None and found.kind == "json" else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set_key(found: dict[str, Any], path: Sequence[str], value: Any) -> None:
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
    """Command line for the flags in a YAML file of `--config`. Raises ConfigError for an invalid file."""
    return config_words(path, _config_entry, (".yaml", ".yml"))


def _config_entry(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    entry = FLAGS.get(name.replace("-", "_"))
    if name == "model_tag":
        flag = "--model"
    if value is None and flag[2:].replace("-", "_") in SECRETS:
        raise UserError(f"{name} has no value")  # the key would be the word None
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
    """Tables of all flags in docs/from-vllm.md."""
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
