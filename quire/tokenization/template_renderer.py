"""Chat templates rendered in Jinja's sandbox, in a helper process. Imports only Jinja and msgspec."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.tokenization.jobs import Failed, Render, Rendered, Setup
from quire.tokenization.template_content import ImagesRefusedError, adapt_message, knows_role, wants_parts

MAX_REASON_CHARACTERS = 1_000
CONTINUE_MARK = "MODEL_CONTINUES_THIS_HERE_ "
"""Mark at the end of a continued message while rendering. Its final space shows whether the template trims; escaping
and case changes leave it intact."""


class ChatTemplateError(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class ContinuationError(Exception):
    """Error of `continue_final_message`: the last message cannot be continued."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate(NamedTuple):
    """Template, and the form of messages that it expects (template_content.py)."""

    template: jinja2.Template
    wants_parts: bool
    knows_developer: bool


class TemplateRenderer:
    """Renderer of one tokenizer's templates, compiled on first use, with Transformers' names in scope."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._compiled: dict[str, CompiledTemplate] = {}

    def answer(self, request: Render, messages: bytes | bytearray) -> Rendered | Failed:
        """Render a conversation. Raises nothing, but the system's limits may end the process. messages: frame after the
        request."""
        try:
            template = self._template(request)
        except MemoryError:
            return Failed("memory")
        except Exception as error:  # Jinja's errors, and those of Python's compiler for too deeply nested code
            return Failed("invalid", _describe(error, named=not isinstance(error, jinja2.TemplateError)))
        try:
            text = self._render(template, request, msgspec.msgpack.decode(messages))
            return Failed("length") if text is None else Rendered(text)
        except MemoryError:
            return Failed("memory")
        except ChatTemplateError as error:
            return Failed("refused", _describe(error, named=False))
        except ImagesRefusedError as error:
            return Failed("refused", str(error))
        except ContinuationError as error:
            return Failed("continued", str(error))
        except Exception as error:  # a template's bugs raise any exception
            return Failed("failed", _describe(error, named=True))

    def _template(self, request: Render) -> CompiledTemplate:
        if request.source is not None:
            return self._compile(request.source)
        template = self._compiled.get(request.template)
        if template is None:
            template = self._compiled[request.template] = self._compile(self._setup.templates[request.template])
        return template

    def _compile(self, source: str) -> CompiledTemplate:
        tree = self._environment.parse(source)
        return CompiledTemplate(self._environment.from_string(tree), wants_parts(tree), knows_role(tree, "developer"))

    def _render(self, template: CompiledTemplate, request: Render, messages: list[dict[str, Any]]) -> str | None:
        """Rendered text; None if too long."""
        as_parts = template.wants_parts if request.content_format == "auto" else request.content_format == "openai"
        max_characters = request.max_characters
        final = None
        if request.continue_final_message:
            final = _mark_final(messages[-1])
            max_characters += len(CONTINUE_MARK)
        variables = {
            "strftime_now": lambda format: request.now.strftime(format),
            **self._setup.special_tokens,
            **request.variables,
        }
        variables["messages"] = [
            adapt_message(message, as_parts=as_parts, knows_developer=template.knows_developer) for message in messages
        ]
        chunks, num_characters = [], 0
        for chunk in template.template.generate(variables):
            num_characters += len(chunk)
            if num_characters > max_characters:
                return None
            chunks.append(chunk)
        text = "".join(chunks)
        text.encode()  # raises for lone surrogates, which no message can carry
        return text if final is None else _cut_at_mark(text, final)


def _mark_final(message: dict[str, Any]) -> str:
    if not message["content"]:
        raise ContinuationError("continue_final_message: the final message has no content")
    text = str(message["content"][-1]["text"])
    message["content"][-1] = {"type": "text", "text": text + CONTINUE_MARK}
    return text.strip()


def _cut_at_mark(text: str, final: str) -> str:
    """Text before the mark, right-stripped if the template trimmed the message. Raises ContinuationError if the
    template changes the message's text."""
    before, mark, after = text.rpartition(CONTINUE_MARK.rstrip())
    if not mark or final not in text:
        raise ContinuationError(
            "continue_final_message: the model's chat template does not write the final message as it is"
        )
    return before if after.startswith(" ") else before.rstrip()


def _describe(error: Exception, *, named: bool) -> str:
    kind = type(error).__name__
    try:
        text = str(error)[:MAX_REASON_CHARACTERS].encode(errors="replace").decode()
    except Exception:  # `str` of an error runs on the template's own objects
        return kind
    return f"{kind}: {text}" if named else text


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
