"""Tool calls as constraints: structural tags (docs/structured-output.md) of answers whose JSON arguments follow
schemas.

`schemas`: argument schemas of callable tools. `parallel`: allow several calls; else the answer ends with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Form = dict[str, Any]
Schemas = Mapping[str, Any]

ANY_TEXT: Form = {"type": "any_text"}
SPACE: Form = {"type": "regex", "pattern": "[ \n]{0,2}"}


def literal(text: str) -> Form:
    return {"type": "const_string", "value": text}


def matching(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def schema_form(schema: Any) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def in_order(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Form]) -> Form:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Form, end: str | Sequence[str] = "") -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end if isinstance(end, str) else list(end)}


def repeated(tags: Sequence[Form], *, at_least_one: bool, at_most_one: bool = False) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": "",
        "at_least_one": at_least_one,
        "stop_after_first": at_most_one,
    }


def in_text(tags: Sequence[Form], parallel: bool) -> Form:
    """Free text; the beginning of a tag in it always begins that tag."""
    triggers = list(dict.fromkeys(each["begin"] for each in tags))
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), "stop_after_first": not parallel}


def calls_or(calls: Form, answer: Form) -> Form:
    """Either calls alone, or the answer. calls: result of `in_text`."""
    tags = [{**each, "end": [end + space for end in _ends(each) for space in ("", "\n")]} for each in calls["tags"]]
    alone = repeated(tags, at_least_one=True, at_most_one=calls["stop_after_first"])
    return one_of([in_order(SPACE, alone), answer])


def _ends(form: Form) -> list[str]:
    end = form["end"]
    return [end] if isinstance(end, str) else list(end)


class CallKeys(NamedTuple):
    """Key names of a call object in a constraint. identifier: empty if calls have no id."""

    name: str = "name"
    arguments: str = "arguments"
    identifier: str = ""


def calls_schema(schemas: Schemas, keys: CallKeys, *, parallel: bool) -> dict[str, Any]:
    identifier = {keys.identifier: {"type": "string", "pattern": "^[0-9]{1,3}$"}} if keys.identifier else {}
    calls, definitions = [], dict[str, Any]()
    for number, (name, schema) in enumerate(schemas.items()):
        place = f"tool_{number}"
        definitions[place] = _resource(schema, number)
        calls.append(
            {
                "type": "object",
                "properties": identifier | {keys.name: {"const": name}, keys.arguments: {"$ref": f"#/$defs/{place}"}},
                "required": [*identifier, keys.name, keys.arguments],
                "additionalProperties": False,
            }
        )
    definitions["call"] = {"anyOf": calls}
    limit = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/call"}, "$defs": definitions, **limit}


def _resource(schema: Any, number: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    identifier = schema.get("$id")
    address, mark, fragment = identifier.partition("#") if isinstance(identifier, str) else ("", "", "")
    return schema if address else {**schema, "$id": f"http://tool-{number}.invalid/{mark}{fragment}"}


def call_objects(schemas: Schemas, keys: CallKeys, parallel: bool) -> Form:
    several = calls_schema(schemas, keys, parallel=parallel)
    definitions = several.pop("$defs")
    return in_order(SPACE, schema_form({"anyOf": [{"$ref": "#/$defs/call"}, several], "$defs": definitions}), SPACE)


def section_calls(markers: tuple[str, str, str, str, str], schemas: Schemas, parallel: bool) -> Form:
    """Calls of DeepSeek-V3 (kind and code block), V3.1 (name alone) and Kimi-K2 (name with number). markers: see
    `SectionFormat.markers`."""
    section, section_end, call, separator, call_end = markers
    forms = []
    for name, schema in schemas.items():
        arguments = schema_form(schema)
        forms += [
            in_order(literal(f"function{separator}{name}\n```json\n"), arguments, literal("\n```")),
            in_order(literal(name + separator), arguments),
            in_order(literal(f"functions.{name}:"), matching("[0-9]{1,3}"), literal(separator), arguments),
        ]
    one = tag(call, one_of(forms), [call_end, call_end + "\n"])
    many = repeated([one], at_least_one=True, at_most_one=not parallel)
    return in_text([tag(section, many, section_end), one], parallel)


def mistral_calls(schemas: Schemas, parallel: bool) -> Form:
    """`[TOOL_CALLS]` before a list of objects, or before a name, an optional id, and arguments."""
    identifier = one_of([literal(""), in_order(literal("[CALL_ID]"), matching("[A-Za-z0-9]{9}"))])
    mark = one_of([literal(""), literal("[ARGS]")])
    forms = [in_order(literal(name), identifier, mark, schema_form(schema)) for name, schema in schemas.items()]
    objects = in_order(SPACE, schema_form(calls_schema(schemas, CallKeys(), parallel=parallel)))
    return in_text([tag("[TOOL_CALLS]", one_of([objects, *forms]))], parallel)


def harmony_calls(schemas: Schemas, answer: Form | None) -> Form:
    """GPT-OSS: reasoning and preambles, then one call, which ends the turn, or the final message, if `answer` is
    given."""
    ends = []
    for name, schema in schemas.items():
        kind = " <|constrain|>json<|message|>"
        ends += [
            tag(f"<|channel|>commentary to=functions.{name}{kind}", schema_form(schema)),
            tag(f" to=functions.{name}<|channel|>commentary{kind}", schema_form(schema)),
        ]
    if answer is not None:
        ends.append(in_order(_HARMONY_FINAL, answer))
    return in_order(_HARMONY_THOUGHTS, one_of(ends))


_HARMONY_THOUGHTS = repeated(
    [
        tag(f"<|channel|>{channel}<|message|>", ANY_TEXT, "<|end|><|start|>assistant")
        for channel in ("analysis", "commentary")
    ],
    at_least_one=False,
)
_HARMONY_FINAL = one_of(
    [literal(f"<|channel|>final{kind}<|message|>") for kind in ("", " <|constrain|>json", "<|constrain|>json")]
)
HARMONY_PREAMBLE = in_order(_HARMONY_THOUGHTS, _HARMONY_FINAL)
"""Start of a GPT-OSS answer, before its text."""


def thoughts(starts: Sequence[str], ends: Sequence[str], before: Sequence[str] = (), *, is_open: bool) -> Form:
    """Optional reasoning up to its end marker. before: markers of which one may follow. is_open: the prompt has opened
    the reasoning, so it must end."""
    shortest = [each for each in starts if not any(each != other and each.startswith(other) for other in starts)]
    opened = [tag(start, ANY_TEXT, ends) for start in shortest]
    form = one_of([tag("", ANY_TEXT, ends), *opened] if is_open else [literal(""), *opened])
    return in_order(form, one_of([literal(""), *map(literal, before)])) if before else form
