"""Fields that constrain an answer's text, under OpenAI's names and vLLM's new and old ones."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.errors import UserError, reject_unknown
from quire.server.protocol.common import SharedFields
from quire.structured_outputs_params import CONSTRAINTS, StructuredOutputsParams

MAX_CONSTRAINT = 2**20
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
WITHOUT_EFFECT = ("_backend", "_backend_was_auto", "backend", "disable_fallback")
"""Fields of `structured_outputs` that select a library; there is only one."""

ConstraintText = Annotated[str, Meta(max_length=MAX_CONSTRAINT)]


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """Field `json_schema` of `response_format`. schema: schema of the answer. It is always enforced, so `strict` makes
    no difference."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """type: "text", "json_object" (optionally with `schema`, as in llama.cpp), "json_schema" (with `json_schema` or
    `schema`) or "structural_tag" (with `format`, or with `structures` and `triggers`)."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def to_options(self) -> dict[str, Any]:
        """Constraint as fields of StructuredOutputsParams; empty: any text."""
        if self.schema is not None and (
            self.type not in ("json_object", "json_schema") or self.json_schema is not None
        ):
            raise UserError("response_format.schema is for type json_object, or for json_schema without json_schema")
        match self.type:
            case "text":
                return {}
            case "json_object":
                return {"json_object": True} if self.schema is None else {"json": self.schema}
            case "json_schema":
                schema = self.schema if self.json_schema is None else self.json_schema.schema
                if schema is None:
                    raise UserError("response_format of type json_schema needs json_schema.schema")
                return {"json": schema}
            case "structural_tag":
                given = {name: getattr(self, name) for name in ("format", "structures", "triggers")}
                return {"structural_tag": {name: value for name, value in given.items() if value is not None}}
        raise UserError(f"response_format must be of type {', '.join(FORMATS)}, not {self.type!r:.100}")


class StructuredFields(SharedFields, kw_only=True, frozen=True):
    """response_format: OpenAI's. structured_outputs: fields of StructuredOutputsParams. guided_*: their old names;
    `guided_decoding_backend` has no effect. At most one constraint may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: ConstraintText | dict[str, Any] | None = None
    guided_regex: ConstraintText | None = None
    guided_choice: list[str] | None = None
    guided_grammar: ConstraintText | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: ConstraintText | None = None

    @property
    def constraint_field(self) -> str:
        form = self.response_format
        if form is not None and (form.type != "text" or form.schema is not None):
            return "response_format"
        return next((f"guided_{name}" for name in self._guided()), "structured_outputs")

    def to_structured_outputs(self) -> StructuredOutputsParams | None:
        """Constraint, if any. Raises UserError with the given field."""
        try:
            found = [options for options in self._options() if options]
            if len(found) > 1:
                raise UserError("give one of response_format, structured_outputs and guided_*, not several")
            return _params(found[0]) if found else None
        except UserError as error:
            raise UserError(error.message, param=self.constraint_field) from None

    def _guided(self) -> dict[str, Any]:
        values = _guided_values(self)
        return {name: value for name, value in zip(_GUIDED, values, strict=True) if value is not None}

    def _options(self) -> list[dict[str, Any]]:
        guided = self._guided()
        if guided and self.guided_whitespace_pattern is not None:
            guided["whitespace_pattern"] = self.guided_whitespace_pattern
        given = {
            name: value
            for name, value in (self.structured_outputs or {}).items()
            if value is not None and name not in WITHOUT_EFFECT
        }
        return [{} if self.response_format is None else self.response_format.to_options(), given, guided]


_GUIDED = tuple(name for name in CONSTRAINTS if f"guided_{name}" in StructuredFields.__struct_fields__)
"""Constraints with a field `guided_*`."""
_guided_values = attrgetter(*(f"guided_{name}" for name in _GUIDED))


def _params(options: dict[str, Any]) -> StructuredOutputsParams:
    reject_unknown(options, StructuredOutputsParams.__struct_fields__, "field of structured_outputs")
    return StructuredOutputsParams(**options)
