"""From StructuredOutputsParams to the text of a grammar, which llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quire.errors import UserError
from quire.structured_output.regex import without_anchors
from quire.structured_output.structural_tags import TagGrammar
from quire.structured_outputs_params import CONSTRAINTS, Preamble, StructuredOutputsParams

MAX_GRAMMAR_CHARACTERS = 2**19
"""Of a schema, a regular expression or a grammar. The largest sets of tools have a tenth of it."""
MAX_REASON = 300
WHITESPACE = r"[ \t]{0,40}(\r?\n[ \t]{0,40})?"
"""Between the parts of JSON: one line feed with an indentation. Without a limit a model that likes blanks writes them
until its length ends."""
BEHIND = "answer"
"""Name of the grammar behind a preamble."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def write_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """The grammar as one text, the same for equal params. Not compiled yet: whether it is one, llguidance says.

    special_tokens: texts that the model writes as one token, and their ids. Raises UserError for what is too large, or
    no JSON where there must be some.
    """
    name = next(name for name in CONSTRAINTS if getattr(params, name) not in (None, False))
    try:
        text = _tags(params, special_tokens) if name == "structural_tag" else _WRITERS[name](params)
        if params.preamble is not None:
            text = _behind(params.preamble, text, special_tokens)
    except UserError:
        raise
    except (ValueError, RecursionError, TypeError) as error:
        raise refusal(name, error) from None
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise refusal(name, f"it has {len(text)} characters, more than {MAX_GRAMMAR_CHARACTERS}")
    return text


def refusal(name: str, reason: object) -> UserError:
    """reason: what is wrong with the field `name`."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    return UserError(f"{name} cannot be used as a constraint: {text[:MAX_REASON]}", param="structured_outputs")


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """As `llguidance.JsonCompileOptions`."""
    if params.whitespace_pattern is not None:
        options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern}
    elif not params.disable_any_whitespace:
        options = {"whitespace_pattern": WHITESPACE}
    else:
        options = {}
    return options | ({"whitespace_flexible": False} if params.disable_any_whitespace else {})


def read_object(value: str | dict[str, Any], what: str) -> dict[str, Any]:
    """An object, or its text."""
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_CHARACTERS:
            raise UserError(
                f"{what} has {len(value)} characters, more than {MAX_GRAMMAR_CHARACTERS}", param="structured_outputs"
            )
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{what} is not JSON: {error}", param="structured_outputs") from None
    if not isinstance(value, dict):
        raise UserError(f"{what} must be a JSON object, not {type(value).__name__}", param="structured_outputs")
    return value


def read_schema(value: str | dict[str, Any] | bool, params: StructuredOutputsParams) -> dict[str, Any]:
    """A JSON schema, with the changes that the params ask for."""
    if isinstance(value, bool):
        return {} if value else {"not": {}}
    schema = read_object(value, "the JSON schema")
    return _closed(schema) if params.disable_additional_properties else schema


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that says nothing about them."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _json(params: StructuredOutputsParams) -> str:
    assert params.json is not None
    return _schema_grammar(read_schema(params.json, params), params)


def _json_object(params: StructuredOutputsParams) -> str:
    return _schema_grammar({"type": "object"}, params)


def _schema_grammar(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options(params))  # type: ignore[arg-type]


def _regex(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    assert params.regex is not None
    return LLMatcher.grammar_from_regex(without_anchors(params.regex))


def _choice(params: StructuredOutputsParams) -> str:
    return lark_grammar("start: " + " | ".join(quoted(text) for text in params.choice or ()))


def _grammar(params: StructuredOutputsParams) -> str:
    assert params.grammar is not None
    return lark_grammar(to_lark(params.grammar))


def _tags(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    assert params.structural_tag is not None
    tag = read_object(params.structural_tag, "the structural tag")
    return lark_grammar(TagGrammar(special_tokens, json_options(params)).start(tag))


def _behind(preamble: Preamble, grammar: str, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a text with a preamble before the one that `grammar` (in Lark's syntax, or in llguidance's JSON)
    describes."""
    grammars = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        grammars = json.loads(grammar).get("grammars")
        if not isinstance(grammars, list) or not grammars or not all(isinstance(each, dict) for each in grammars):
            raise ValueError("a grammar in JSON needs a list of `grammars`")
    first = TagGrammar({**special_tokens, **preamble.tokens}, {}).start({"format": preamble.format}, f"@{BEHIND}")
    return json.dumps({"grammars": [{"lark_grammar": first}, grammars[0] | {"name": BEHIND}, *grammars[1:]]})


def to_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, from that or from EBNF (`name ::= ...`)."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(error) from None


def lark_grammar(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def quoted(text: str) -> str:
    """A literal in Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


_WRITERS: dict[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
