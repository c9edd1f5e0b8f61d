"""Record of one option at its field, from which flags, help and documents are made."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec


class Option(NamedTuple):
    """Metadata of a field (`Annotated[int, KV("tokens per KV block")]`). help: one line, at most 100 characters. flags:
    other names of its flag. reads: makes the value of a text or number that a user writes; None: the field's type
    does."""

    group: OptionGroup
    help: str
    flags: tuple[str, ...] = ()
    reads: Callable[..., Any] | None = None


class OptionGroup(NamedTuple):
    """Heading of options that `--help` shows together, and `--help=NAME` alone."""

    name: str
    title: str

    def __call__(self, text: str, *flags: str, reads: Callable[..., Any] | None = None) -> Option:
        return Option(self, text, flags, reads)


FIRST = OptionGroup("first", "what most servers set")
MODEL = OptionGroup("model", "the model and its files")
IMAGES = OptionGroup("images", "images")
KV = OptionGroup("kv", "the KV cache")
SCHEDULING = OptionGroup("scheduling", "steps and waiting requests")
ADAPTERS = OptionGroup("adapters", "adapters of low rank")
DEVICE = OptionGroup("device", "what computes")
ANSWERS = OptionGroup("answers", "requests and answers")
FILES = OptionGroup("files", "files and batches of clients")
ACCESS = OptionGroup("access", "who may do what")
HTTP = OptionGroup("http", "connections and processes")
OBSERVE = OptionGroup("observe", "logs, metrics and traces")
GROUPS = FIRST, MODEL, IMAGES, KV, SCHEDULING, ADAPTERS, DEVICE, ANSWERS, FILES, ACCESS, HTTP, OBSERVE
"""All groups, in the help's order."""


@cache
def options_of(struct: type[msgspec.Struct]) -> Mapping[str, Option]:
    """`Option` records of a struct's fields, by name, for flags; fields without one are left out."""
    hints = typing.get_type_hints(struct, include_extras=True)
    records = {name: getattr(hints[name], "__metadata__", (None,))[0] for name in struct.__struct_fields__}
    return {name: record for name, record in records.items() if isinstance(record, Option)}
