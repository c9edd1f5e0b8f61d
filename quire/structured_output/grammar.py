"""StructuredOutputsParams to a grammar's text for llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import UserError
from quire.structured_output import ebnf
from quire.structured_output.json_schema import MAX_LITERAL, normalise, parse_schema
from quire.structured_output.patterns import Budget
from quire.structured_output.regex import without_anchors
from quire.structured_output.schema_grammar import LarkWriter, json_document
from quire.structured_output.schema_joins import JoinBudget, tell_apart
from quire.structured_output.structural_tags import TagGrammar
from quire.structured_outputs_params import CONSTRAINTS, Preamble, StructuredOutputsParams

MAX_GRAMMAR_CHARACTERS = 2**19
"""Limit of a JSON schema, structural tag or resulting grammar in characters."""
MAX_EXPRESSION_CHARACTERS = 2**16
"""Limit of a regular expression or grammar in characters."""
MAX_REASON = 300
WHITESPACE = r"[ \t]{0,40}(\r?\n[ \t]{0,40})?"
"""Blanks between the parts of JSON: one line feed with an indentation, as some models write blanks without end."""
BEHIND = "answer"
"""Name of the grammar after a preamble."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def write_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """Grammar as text, equal for equal params; only llguidance can check it. special_tokens: texts that the model
    writes as one token -> ids. Raises UserError for a too large constraint, or invalid JSON."""
    name = next(name for name in CONSTRAINTS if getattr(params, name) not in (None, False))
    try:
        _check_lengths(params)
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
    text = " ".join(str(reason).split()) or type(reason).__name__
    return UserError(f"{name} cannot be used as a constraint: {text[:MAX_REASON]}", param="structured_outputs")


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern}
    elif not params.disable_any_whitespace:
        options = {"whitespace_pattern": WHITESPACE}
    else:
        options = {}
    return options | ({"whitespace_flexible": False} if params.disable_any_whitespace else {})


def _check_lengths(params: StructuredOutputsParams) -> None:
    limits = {"regex": MAX_EXPRESSION_CHARACTERS, "grammar": MAX_EXPRESSION_CHARACTERS}
    limits |= {"whitespace_pattern": MAX_EXPRESSION_CHARACTERS}
    for name, limit in (limits | {"json": MAX_GRAMMAR_CHARACTERS, "structural_tag": MAX_GRAMMAR_CHARACTERS}).items():
        text = getattr(params, name)
        if isinstance(text, str) and len(text) > limit:
            raise ValueError(f"{name} has {len(text)} characters, more than {limit}")
    for text in params.choice or ():
        if len(text) > MAX_LITERAL:
            raise ValueError(f"a choice has {len(text)} characters, more than {MAX_LITERAL}")


def json_text(value: str | dict[str, Any] | bool) -> str:
    """Schema as JSON. Raises ValueError for a text that is too large or not JSON."""
    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, more than {MAX_GRAMMAR_CHARACTERS}")
    return text


def read_object(value: str | dict[str, Any], what: str) -> dict[str, Any]:
    """JSON object, given as such or as text. Raises ValueError."""
    try:
        found = parse_schema(json_text(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(found).__name__}")
    return found


def _json(params: StructuredOutputsParams) -> str:
    assert params.json is not None
    return _schema_grammar(read_object(params.json, "the JSON schema"), params)


def _json_object(params: StructuredOutputsParams) -> str:
    return _schema_grammar({"type": "object"}, params)


def _schema_grammar(given: dict[str, Any], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    options, budget, joins = json_options(params), Budget(), JoinBudget()
    schema = normalise(given, budget, closed=params.disable_additional_properties)
    tell_apart(schema, joins)
    if schema.has_digits:
        return lark_grammar(LarkWriter(schema, options, budget, joins).grammar())
    return LLMatcher.grammar_from_json_schema(json.dumps(json_document(schema, options), separators=(",", ":")))


def _regex(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    assert params.regex is not None
    return LLMatcher.grammar_from_regex(without_anchors(params.regex))


def _choice(params: StructuredOutputsParams) -> str:
    return lark_grammar("start: " + " | ".join(ebnf.quoted(text) for text in params.choice or ()))


def _grammar(params: StructuredOutputsParams) -> str:
    assert params.grammar is not None
    return lark_grammar(to_lark(params.grammar))


def _tags(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    assert params.structural_tag is not None
    tag = read_object(params.structural_tag, "the structural tag")
    grammar = TagGrammar(special_tokens, json_options(params), closed=params.disable_additional_properties)
    start = grammar.start(tag)
    if not grammar.schemas:
        return lark_grammar(start)
    named = [{"name": name, "lark_grammar": text} for name, text in grammar.schemas.items()]
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": start}, *named]})


def _behind(preamble: Preamble, grammar: str, special_tokens: Mapping[str, int]) -> str:
    """Grammar of a preamble before `grammar` (in Lark's syntax, or llguidance's JSON)."""
    grammars = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        grammars = json.loads(grammar).get("grammars")
        if not isinstance(grammars, list) or not grammars or not all(isinstance(each, dict) for each in grammars):
            raise ValueError("a grammar in JSON needs a list of `grammars`")
    first = TagGrammar({**special_tokens, **preamble.tokens}, {}).start({"format": preamble.format}, f"@{BEHIND}")
    return json.dumps({"grammars": [{"lark_grammar": first}, grammars[0] | {"name": BEHIND}, *grammars[1:]]})


def to_lark(grammar: str) -> str:
    return ebnf.to_lark(grammar) if ebnf.is_ebnf(grammar) else grammar


def lark_grammar(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


_WRITERS: dict[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
