"""Structural tags: text with parts between marks that follow schemas, as one grammar. The forms are xgrammar's, as in
vLLM: `{"format": {"type": ...}}`, or the older `{"structures": [...], "triggers": [...]}`."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import UserError
from quire.structured_output.ebnf import quoted
from quire.structured_output.json_schema import MAX_LITERAL, normalise
from quire.structured_output.patterns import Budget
from quire.structured_output.schema_grammar import LarkWriter, json_document, slashed
from quire.structured_output.schema_joins import JoinBudget, tell_apart

MAX_DEPTH = 32
MAX_PARTS = 4096
FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""Type of format -> its fields, besides type."""
ANY_TEXT = r"/(.|\n)*/"


class TagGrammar:
    """Writer of a structural tag's grammar in Lark's syntax. `rules`: one line per rule."""

    def __init__(
        self, special_tokens: Mapping[str, int], schema_options: dict[str, Any], *, closed: bool = False
    ) -> None:
        """special_tokens: texts that the model writes as one token, which is no text -> ids. schema_options: see
        `grammar.json_options`. closed: see `normalise`."""
        self._closed = closed
        names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._ids = special_tokens
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._schema_options = schema_options
        self._schema_rules: dict[str, str] = {}
        self._budget, self._joins = Budget(), JoinBudget()
        self.rules: list[str] = []
        self.schemas: dict[str, str] = {}
        """Further grammars in Lark's syntax, by name."""

    def start(self, tag: dict[str, Any], behind: str = "") -> str:
        """Grammar in Lark's syntax. behind: name of a grammar for the text after the tag."""
        form = tag.get("format")
        if form is None:
            form = _from_structures(tag)
        body = self._form(form, 0)
        return "\n".join([f"start: {body} {behind}".rstrip(), *self.rules, f"TAG_TEXT: {ANY_TEXT}"])

    def _form(self, form: Any, depth: int) -> str:
        if not isinstance(form, dict):
            raise _error(f"a format must be an object, not {type(form).__name__}")
        if depth > MAX_DEPTH:
            raise _error(f"it is nested more than {MAX_DEPTH} levels deep")
        kind = form.get("type")
        writers: dict[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": lambda form, _: self._text(_string(form, "value")),
            "json_schema": lambda form, _: self._schema(form.get("json_schema")),
            "regex": lambda form, _: self._rule(f"/{slashed(_string(form, 'pattern'))}/"),
            "any_text": lambda form, _: "TAG_TEXT",
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        if not isinstance(kind, str) or kind not in writers:
            raise _error(f"formats are of type {', '.join(writers)}, not {kind!r:.100}")
        _check_fields(form, kind)
        return writers[kind](form, depth + 1)

    def _rule(self, body: str, attributes: str = "") -> str:
        if len(self.rules) > MAX_PARTS:
            raise _error(f"it has more than {MAX_PARTS} parts")
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, text: str) -> str:
        pieces, start = [], 0
        for found in self._special.finditer(text) if self._special else ():
            pieces += [_quoted(text[start : found.start()]), f"<[{self._ids[found[0]]}]>"]
            start = found.end()
        pieces.append(_quoted(text[start:]))
        return " ".join(piece for piece in pieces if piece) or '""'

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise _error("json_schema must be a JSON schema")
        text = json.dumps(schema)
        if text not in self._schema_rules:
            try:
                normal = normalise(schema, self._budget, closed=self._closed)
                tell_apart(normal, self._joins)
                if normal.has_digits:
                    name = f"schema_{len(self.schemas)}"
                    self.schemas[name] = LarkWriter(normal, self._schema_options, self._budget, self._joins).grammar()
                    self._schema_rules[text] = self._rule(f"@{name}")
                else:
                    document = json_document(normal, self._schema_options)
                    self._schema_rules[text] = self._rule(f"%json {json.dumps(document)}")
            except ValueError as error:
                raise _error(str(error)) from None
        return self._schema_rules[text]

    def _sequence(self, form: dict[str, Any], depth: int) -> str:
        return self._rule(" ".join(self._form(each, depth) for each in _objects(form, "elements")))

    def _or(self, form: dict[str, Any], depth: int) -> str:
        return self._rule(" | ".join(self._form(each, depth) for each in _objects(form, "elements")))

    def _tag(self, form: dict[str, Any], depth: int) -> str:
        return self._rule(f"{self._text(_string(form, 'begin'))} {self._content(form, depth)}")

    def _content(self, form: dict[str, Any], depth: int) -> str:
        _check_fields(form, "tag")
        content, end = form.get("content"), form.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(each, str) for each in ends):
            raise _error("the end of a tag must be a string, or a list of them")
        for each in ends:
            _check_length(each, "end")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._rule(" | ".join(self._up_to(each) for each in ends))
        closing = self._rule(" | ".join(self._text(each) for each in ends))
        return self._rule(f"{self._form(content, depth)} {closing}")

    def _up_to(self, mark: str) -> str:
        if self._special is not None and self._special.match(mark):
            return self._rule(f"TAG_TEXT {self._text(mark)}")
        return self._rule(f"TAG_TEXT {_quoted(mark)}", "[lazy]")

    def _triggered(self, form: dict[str, Any], depth: int) -> str:
        tags, triggers = _objects(form, "tags"), form.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
            raise _error("triggers must be a list of non-empty strings")
        matches: dict[str, list[tuple[str, dict[str, Any]]]] = {trigger: [] for trigger in triggers}
        lengths, num_matches = sorted(set(map(len, matches))), 0
        for tag in tags:
            begin = _string(tag, "begin")
            shorter = lengths[: bisect_right(lengths, len(begin))]
            known = [begin[:length] for length in shorter if begin[:length] in matches]
            if not known:
                raise _error("each tag must begin with one of the triggers")
            num_matches += len(known)
            if num_matches > MAX_PARTS:
                raise _error(f"it has more than {MAX_PARTS} parts")
            for trigger in known:
                matches[trigger].append((begin[len(trigger) :], tag))
        choices = []
        for trigger, found in matches.items():
            rests = [self._rule(f"{self._text(rest)} {self._content(tag, depth)}") for rest, tag in found]
            if rests:
                choices.append(self._rule(f"{self._up_to(trigger)} ({' | '.join(rests)})"))
        each = self._rule(" | ".join(choices))
        if form.get("stop_after_first"):
            return each if form.get("at_least_one") else self._rule(f"{each} | TAG_TEXT")
        return self._rule(f"{each}{'+' if form.get('at_least_one') else '*'} TAG_TEXT")

    def _separated(self, form: dict[str, Any], depth: int) -> str:
        each = self._rule(" | ".join(self._tag(tag, depth) for tag in _objects(form, "tags")))
        if form.get("stop_after_first"):
            found = each
        else:
            separator = self._text(_string(form, "separator"))
            found = self._rule(f"{each} ({separator} {each})*")
        return found if form.get("at_least_one") else f"({found})?"


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema")},
            "end": each.get("end", ""),
        }
        for each in _objects(tag, "structures")
    ]
    return {"type": "triggered_tags", "tags": tags, "triggers": tag.get("triggers")}


def _check_fields(form: dict[str, Any], kind: str) -> None:
    unknown = next((name for name in form if name not in ("type", *FIELDS[kind])), None)
    if unknown is not None:
        raise _error(f"a format of type {kind} has no field {unknown!r:.100}")


def _string(form: dict[str, Any], name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise _error(f"{name} must be a string")
    _check_length(value, name)
    return value


def _check_length(text: str, name: str) -> None:
    if len(text) > MAX_LITERAL:
        raise _error(f"{name} has {len(text)} characters, more than {MAX_LITERAL}")


def _objects(form: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(each, dict) for each in values):
        raise _error(f"{name} must be a list of objects")
    return values


def _quoted(text: str) -> str:
    return quoted(text) if text else ""


def _error(reason: str) -> UserError:
    return UserError(f"structural_tag cannot be used as a constraint: {reason}", param="structured_outputs")
