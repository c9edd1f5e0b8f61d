"""File of flags, in YAML or TOML: `quire serve --config FILE`."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.cli.parser import Parser, id_values, integers, json_object
from quire.errors import ConfigError, UserError
from quire.utils.failures import one_line
from quire.utils.text_files import read_text_file

SECRETS = ("api_key", "admin_api_key", "hf_token")
"""Options whose values `--print-config` omits."""
ONLY_IN_LINE = ("--config", "--print-config", "--help")


def config_words(
    path: str, write: Callable[[str, Any], list[str]], suffixes: Iterable[str] = (".yaml", ".yml", ".toml")
) -> list[str]:
    """Command line for the flags in a file. write: returns the words of a flag with its value. Raises ConfigError for
    an invalid file."""
    suffix = Path(path).suffix
    if suffix not in suffixes:
        raise ConfigError(f"config: {path} must end in {' or '.join(suffixes)}", param="config")
    text = read_text_file(path, param="config")
    kind = "TOML" if suffix == ".toml" else "YAML"
    try:
        content = tomllib.loads(text) if kind == "TOML" else _yaml(text)
        is_mapping = isinstance(content, dict) and all(isinstance(name, str) for name in content)
        words = [word for entry in content.items() for word in write(*entry)] if is_mapping else None
    except UserError as error:
        raise ConfigError(f"config: {path}: {error}", param="config") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        # PyYAML's conversions raise any of these: for dates, too long numbers, aliases, tags that do not fit the value.
        raise ConfigError(f"config: {path} is not valid {kind}: {one_line(str(error))}", param="config") from None
    if words is None:
        raise ConfigError(f"config: {path} must map flags to values", param="config")
    return words


def _yaml(text: str) -> Any:
    import yaml  # takes 0.1 s, which command lines without a file save

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def parse_config(path: str, parser: Parser) -> argparse.Namespace:
    """Flags of a `--config` file. Raises ConfigError for an unknown flag or invalid value."""

    def write(name: str, value: Any) -> list[str]:
        flag = "--" + name.replace("_", "-").removeprefix("--")
        if flag in ONLY_IN_LINE:
            raise UserError(f"{name} is no setting of a file")
        action = parser.action_of(flag)
        return [f"{flag}={value}"] if action is None else _arguments(flag, value, action)

    words = config_words(path, write)
    try:
        return parser.parse(words)
    except UserError as error:
        raise ConfigError(f"config: {path}: {error}", param="config") from None


def _arguments(flag: str, value: Any, action: argparse.Action) -> list[str]:
    if value is True and isinstance(action, argparse.BooleanOptionalAction):
        return [flag]
    if value is False and isinstance(action, argparse.BooleanOptionalAction):
        return ["--no-" + flag[2:]]
    if isinstance(value, Mapping):
        items = ",".join(f"{key}={each}" for key, each in value.items())
        return [f"{flag}={items if action.type is id_values else json.dumps(value)}"]
    if isinstance(value, list):
        if action.type is json_object:
            return [f"{flag}={json.dumps(value)}"]
        if action.type is integers:
            return [f"{flag}={','.join(map(str, value))}"]
        return [word for each in value for word in _arguments(flag, each, action)]
    if value is None and not _takes_none(action):
        raise UserError(f"{flag[2:]} has no value")
    return [f"{flag}={'none' if value is None else str(value).lower() if isinstance(value, bool) else value}"]


def _takes_none(action: argparse.Action) -> bool:
    try:
        return callable(action.type) and action.type("none") is None
    except ValueError:
        return False


def written(values: Mapping[str, Any]) -> str:
    """Text of a YAML file for `--config`. Keys are omitted, with a comment."""
    import yaml

    shown = {name.replace("_", "-"): value for name, value in values.items() if name not in SECRETS}
    hidden = [f"# {name.replace('_', '-')} is set, and not shown\n" for name in SECRETS if values.get(name)]
    text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return "".join(hidden) + text
