"""Chat templates of checkpoints (Jinja), rendered in sandboxed helper processes (helpers.py) under limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from quire.errors import PromptTooLongError, UserError
from quire.tokenization.conversation import Conversation, written
from quire.tokenization.helpers import Conversion, Helpers, Rendering
from quire.tokenization.jobs import (
    RESERVED_OPTIONS,
    Failed,
    Render,
    Setup,
    TemplateLimits,
    Tokenising,
    TokenizerSource,
)
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.frames import encode_frame
from quire.utils.sizes import format_bytes

DEFAULT_LIMITS = TemplateLimits()
MAX_CHARACTERS = 16 * 2**20
"""Default limit of a text."""


class ChatTemplate:
    """Templates of one tokenizer, rendered by `helpers`. Thread-safe.

    templates: name -> Jinja source; "tool_use", if given, serves requests with tools. special_tokens: template
        variables. now: time for `strftime_now`. tokenizer: for helpers that also tokenize.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        limits: TemplateLimits = DEFAULT_LIMITS,
        now: Callable[[], datetime] = datetime.now,
        tokenizer: TokenizerSource | None = None,
    ) -> None:
        self._names = frozenset(templates)
        self._now = now
        self.helpers = Helpers(Setup(dict(templates), dict(special_tokens), limits, tokenizer))

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: TokenizerSource | None = None) -> ChatTemplate:
        return cls(tokenizer.chat_templates, tokenizer.special_tokens, tokenizer=source)

    def prepare(
        self,
        conversation: Conversation,
        max_characters: int = MAX_CHARACTERS,
        tokenising: Tokenising | None = None,
    ) -> Conversion:
        """Make a helper's job of a request's conversation. max_characters: limit of the text. tokenising: set if the
        helper shall tokenize a long text. Raises UserError for reserved variables, values that cannot be encoded, too
        large a conversation, or a model without a template.
        """
        for name in conversation.variables:
            if name in RESERVED_OPTIONS:
                raise UserError(
                    f"chat_template_kwargs must not set {name!r}: it is reserved", param="chat_template_kwargs"
                )
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        variables = {
            **conversation.variables,
            "tools": list(conversation.tools) if conversation.tools else None,
            "documents": list(conversation.documents) if conversation.documents else None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        render = Render(
            "" if conversation.source is not None else self._template(with_tools=bool(conversation.tools)),
            variables,
            self._now(),
            max_characters,
            conversation.content_format,
            conversation.source,
            conversation.continue_final_message,
            tokenising,
        )
        work = Conversion(written(encode_frame, render), conversation.messages.encoded, max_characters)
        limit = self.helpers.limits.max_conversation_bytes
        if work.size > limit:
            raise UserError(
                f"the conversation has {work.size} bytes; a chat template is given at most {limit}", param="messages"
            )
        return work

    def write(self, work: Conversion) -> Rendering:
        """Prompt's text from a helper, with token ids if the helper made them. Raises UserError for an invalid or
        failing template, refused messages or exceeded limits; PromptTooLongError; and errors of Helpers.render."""
        found = self.helpers.render(work)
        if isinstance(found, Failed):
            raise self._error(found, work.max_characters)
        return found

    def _template(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._names else "default"
        if name not in self._names:
            raise UserError("this model has no chat template: use completions with a plain prompt", param="messages")
        return name

    def _error(self, failed: Failed, max_characters: int) -> UserError:
        if failed.kind == "length":
            return PromptTooLongError(
                f"the prompt has more than {max_characters} characters, far more than the model's context holds",
                param="messages",
            )
        if failed.kind == "continued":
            return UserError(failed.reason, param="messages")
        return UserError(f"the model's chat template {self._sentence(failed)}", param="messages")

    def _sentence(self, failed: Failed) -> str:
        limits = self.helpers.limits
        match failed.kind:
            case "invalid":
                return f"is not valid: {failed.reason}"
            case "refused":
                return f"refuses these messages: {failed.reason}"
            case "memory":
                return f"was stopped: it needs more than {format_bytes(limits.memory)} of memory"
            case "time":
                return (
                    f"was stopped: it took too long (a conversation has {limits.cpu_seconds:g} s of processor time "
                    f"and {limits.seconds:g} s in all)"
                )
            case _:
                return f"failed: {failed.reason}"
