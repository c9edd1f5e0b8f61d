"""Chat templates: a conversation written as one string by the Jinja template that comes with the checkpoint.

Templates come from checkpoints, never from requests. They run sandboxed, and metered: loops, calls and the text they
make are paid from a budget, so a template (or a conversation made to upset one) ends in an error and not in a stuck
server. The names in scope are those that Transformers offers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from quire.errors import UserError
from quire.tokenization.metered_sandbox import BudgetError, MeteredSandbox
from quire.tokenization.tokenizer import Tokenizer

RESERVED_OPTIONS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "truncation",
        "padding",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that are set elsewhere, or mean something to Transformers' own method: no template option may take them."""
CONTINUE_MARK = "<|quire: the final message continues here|> "
"""Stands at the end of the message to continue while rendering. Its last space shows whether the template trims."""


class ChatTemplateError(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class ChatTemplate:
    """The templates of one tokenizer, each compiled when first used. Thread-safe.

    templates: name -> Jinja source; "tool_use", when there is one, is taken for requests with tools.
    special_tokens: in scope under their names. now: the time for `strftime_now`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment = _environment(now)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        return cls(tokenizer.chat_templates, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the conversation.

        add_generation_prompt: end with the beginning of an answer. continue_final_message: end inside the last
        message instead, so that it is continued. options: further variables for the template
        (`chat_template_kwargs`). Raises UserError for messages that are malformed or that the template refuses, for
        reserved options, and when the model has no template.
        """
        template = self._template(with_tools=bool(tools))
        for name in options or ():
            if name in RESERVED_OPTIONS:
                raise UserError(
                    f"chat_template_kwargs must not set {name!r}: it is reserved", param="chat_template_kwargs"
                )
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        conversation = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not conversation:
            raise UserError("messages must hold at least one message", param="messages")
        if continue_final_message:
            _mark_final(conversation)
        variables = {
            **self._special_tokens,
            **(options or {}),
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(template, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _template(self, *, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise UserError("this model has no chat template: use completions with a plain prompt", param="messages")
        compiled = self._compiled.get(name)
        if compiled is None:
            try:
                compiled = self._environment.compile_metered(self._sources[name])
            except (jinja2.TemplateError, RecursionError) as error:
                raise UserError(f"the model's chat template is not valid: {error}", param="messages") from None
            self._compiled[name] = compiled
        return compiled

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_metered(template, variables)
        except ChatTemplateError as error:
            raise UserError(f"the model's chat template refuses these messages: {error}", param="messages") from None
        except BudgetError as error:
            raise UserError(f"the model's chat template was stopped: {error}", param="messages") from None
        # A template is a program that someone else wrote: what its bugs raise cannot be listed, and none of them may
        # look like a failure of the server.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the model's chat template failed: {reason}", param="messages") from None


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: a role, and content that is a string (or None, beside tool calls)."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UserError(f"{where} must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} needs a role", param="messages")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_of_part(part, where) for part in content)
    elif content is not None and not isinstance(content, str):
        raise UserError(f"{where}: content must be a string or a list of parts", param="messages")
    if content is None and role != "assistant":
        raise UserError(f"{where} needs content", param="messages")
    return {**message, "content": content}


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise UserError(f"{where}: content parts must be text, not {kind!r:.100}", param="messages")


def _mark_final(conversation: list[dict[str, Any]]) -> None:
    final = conversation[-1]
    if not isinstance(final["content"], str):
        raise UserError("continue_final_message: the final message has no content", param="messages")
    final["content"] += CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    """Everything before the mark; without trailing space when the template trimmed the message it stood in."""
    before, mark, after = text.rpartition(CONTINUE_MARK.rstrip())
    if not mark:
        raise UserError(
            "continue_final_message: the model's chat template does not write the final message", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant says, for training. Here: just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> MeteredSandbox:
    environment = MeteredSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


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
