"""The process that renders chat templates. Started by TemplateProcess (template_client.py) with a socket as its
standard input, whose end ends the process.

A template is a program that comes with a model, and no check of a program can tell what it costs to run. So it runs
here, sandboxed by Jinja, where the system limits its time and its memory. This module imports Jinja and msgspec only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.tokenization.template_content import adapt_message, knows_role, wants_parts
from quire.tokenization.template_messages import (
    MAX_SETUP_BYTES,
    Failed,
    Render,
    Rendered,
    Setup,
    TemplateLimits,
    encode_frame,
    read_frame,
)

MAX_REASON_CHARACTERS = 1_000
DEADLY = (signal.SIGPROF, signal.SIGALRM)
"""What the timers send."""


class ChatTemplateError(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant says, for training. Here: just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate(NamedTuple):
    """A template, and what its source says of the messages that it expects (template_content.py)."""

    template: jinja2.Template
    wants_parts: bool
    knows_developer: bool


class TemplateRenderer:
    """Renders the templates of one tokenizer, each compiled when first used. The names in scope are those that
    Transformers offers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._compiled: dict[str, CompiledTemplate] = {}

    def answer(self, request: Render) -> Rendered | Failed:
        """Never raises, but for what the system's limits make of it."""
        try:
            template = self._template(request)
        except MemoryError:
            return Failed("memory")
        except Exception as error:  # Jinja's own, and what Python's compiler raises for code nested too deeply
            return Failed("invalid", _describe(error, named=not isinstance(error, jinja2.TemplateError)))
        try:
            text = self._render(template, request)
            return Failed("length") if text is None else Rendered(text)
        except MemoryError:
            return Failed("memory")
        except ChatTemplateError as error:
            return Failed("refused", _describe(error, named=False))
        except Exception as error:  # what the bugs of a template raise cannot be listed
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

    def _render(self, template: CompiledTemplate, request: Render) -> str | None:
        """The text, or None once it is longer than asked for."""
        as_parts = template.wants_parts if request.content_format == "auto" else request.content_format == "openai"
        variables = {
            "strftime_now": lambda format: request.now.strftime(format),
            **self._setup.special_tokens,
            **request.variables,
        }
        variables["messages"] = [
            adapt_message(message, as_parts=as_parts, knows_developer=template.knows_developer)
            for message in request.variables.get("messages", ())
        ]
        chunks, num_characters = [], 0
        for chunk in template.template.generate(variables):
            num_characters += len(chunk)
            if num_characters > request.max_characters:
                return None
            chunks.append(chunk)
        text = "".join(chunks)
        text.encode()  # lone surrogates, which no message can carry
        return text


def main() -> None:
    connection = socket.socket(fileno=os.dup(0))
    frame = read_frame(connection, MAX_SETUP_BYTES)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=Setup)
    renderer = TemplateRenderer(setup)
    _confine(setup.limits)
    try:
        while (frame := read_frame(connection, setup.limits.max_conversation_bytes)) is not None:
            _set_timers(setup.limits.cpu_seconds, setup.limits.seconds)
            answer = _answer(renderer, frame)
            _set_timers(0, 0)
            connection.sendall(answer)
    except ConnectionError:
        pass  # the parent process has ended
    os._exit(0)


def _answer(renderer: TemplateRenderer, frame: bytearray) -> bytearray:
    try:
        answer = renderer.answer(msgspec.msgpack.decode(frame, type=Render))
        return encode_frame(answer)
    except MemoryError:
        return encode_frame(Failed("memory"))
    except RecursionError:
        return encode_frame(Failed("failed", "RecursionError: the variables are nested too deeply"))


def _confine(limits: TemplateLimits) -> None:
    """From here on: no more memory than the limit, no core dump, nothing on standard error, and no end by signals that
    reach every process of a service, whose main process closes the connection when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in DEADLY:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEADLY)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # other systems have the name, and refuse or ignore the value
        _limit(resource.RLIMIT_AS, limits.memory)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _set_timers(cpu_seconds: float, seconds: float) -> None:
    """When one runs out, the system ends the process, whatever it does; also when its parent has been killed."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _describe(error: Exception, *, named: bool) -> str:
    kind = type(error).__name__
    try:
        text = str(error)[:MAX_REASON_CHARACTERS].encode(errors="replace").decode()
    except Exception:  # a template chooses what its errors are about
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
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
