"""Chat templates: a conversation written as one string by the Jinja template that comes with the checkpoint.

Templates come from checkpoints, never from requests. They run in processes of their own (template_client.py,
template_process.py), sandboxed, with limits on time and memory that the system enforces, so a template (or a
conversation made to upset one) ends in an error and not in a stuck server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from quire.errors import PromptTooLongError, UserError
from quire.tokenization.template_client import SHORT_CONVERSATION_BYTES, TemplateLane
from quire.tokenization.template_messages import (
    RESERVED_OPTIONS,
    ContentFormat,
    Failed,
    Render,
    Rendered,
    Setup,
    TemplateLimits,
    encode_each,
    encode_frame,
)
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.sizes import format_bytes

ROLES_WITHOUT_CONTENT = ("assistant", "tool", "function")
"""Roles whose messages may have no content: a call of a tool has no text, and its result may be empty."""
TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part -> the field with its text."""
DEFAULT_LIMITS = TemplateLimits()
MAX_CHARACTERS = 16 * 2**20
"""Longest text, where the caller knows no limit."""
CONTINUE_MARK = "MODEL_CONTINUES_THIS_HERE_ "
"""Stands at the end of the message to continue while rendering. Its last space shows whether the template trims; it has
the length of Transformers' mark and its kinds of characters, which templates that escape or raise letters leave."""


class TemplateChoice(NamedTuple):
    """Which template writes a conversation, and how it gets the content of messages (template_content.py). source: of a
    template to take instead of the model's."""

    source: str | None = None
    content_format: ContentFormat = "auto"


DEFAULT_CHOICE = TemplateChoice()


class PreparedConversation(NamedTuple):
    """The messages of a conversation as the processes that render get them, or why they cannot be. messages: encoded,
    one by one; final: the text of the last one to be continued, which ends with CONTINUE_MARK, without space around it
    (None: the conversation is not continued)."""

    messages: list[msgspec.Raw]
    final: str | None
    error: UserError | None = None


def prepare_conversation(
    messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool
) -> PreparedConversation:
    """Check and encode the messages of a conversation, which another process may do for `ChatTemplate.submit`."""
    try:
        conversation = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not conversation:
            raise UserError("messages must hold at least one message", param="messages")
        final = _mark_final(conversation) if continue_final_message else None
        with _encoding_errors():
            return PreparedConversation(encode_each(conversation), final)
    except UserError as error:
        return PreparedConversation([], "" if continue_final_message else None, error)


@contextlib.contextmanager
def _encoding_errors() -> Iterator[None]:
    """What msgpack does not have is the caller's mistake."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise UserError(
            f"messages is not valid Unicode: lone surrogate at position {error.start}", param="messages"
        ) from None
    except RecursionError:
        raise UserError("messages are nested too deeply", param="messages") from None
    except (TypeError, OverflowError) as error:
        raise UserError(f"messages hold what a chat template cannot be given: {error}", param="messages") from None


class ChatTemplate:
    """The templates of one tokenizer. Thread-safe. `close` ends the processes that render them.

    templates: name -> Jinja source; "tool_use", when there is one, is taken for requests with tools.
    special_tokens: in scope under their names. now: the time for `strftime_now`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        limits: TemplateLimits = DEFAULT_LIMITS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._names = frozenset(templates)
        self._limits = limits
        self._now = now
        setup = Setup(dict(templates), dict(special_tokens), limits)
        self.lanes = (TemplateLane(setup), TemplateLane(setup))
        """For short and for long conversations."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        return cls(tokenizer.chat_templates, tokenizer.special_tokens)

    def close(self) -> None:
        """Leave nothing of the processes; what is being rendered raises EngineDeadError. Idempotent."""
        for lane in self.lanes:
            lane.close()

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of `submit`, waited for."""
        return self.submit(messages, **options).result()

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]] | PreparedConversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        choice: TemplateChoice = DEFAULT_CHOICE,
        max_characters: int = MAX_CHARACTERS,
    ) -> Future[str]:
        """Have the conversation written, in a process beside this one.

        messages: as they are, or prepared (`prepare_conversation`) with the same `continue_final_message`.
        add_generation_prompt: end with the beginning of an answer. continue_final_message: end inside the last
        message instead, so that it is continued. options: further variables for the template
        (`chat_template_kwargs`). documents: for templates that know them. max_characters: a longer text is rejected.

        Raises UserError for messages that are malformed, for reserved options, and when the model has no template. The
        future raises UserError when the template is not valid, fails, rejects the messages or exceeds its limits,
        PromptTooLongError for a text that is too long, and what TemplateLane.submit says.
        """
        template = "" if choice.source is not None else self._template(with_tools=bool(tools))
        for name in options or ():
            if name in RESERVED_OPTIONS:
                raise UserError(
                    f"chat_template_kwargs must not set {name!r}: it is reserved", param="chat_template_kwargs"
                )
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if not isinstance(messages, PreparedConversation):
            messages = prepare_conversation(messages, continue_final_message=continue_final_message)
        final = messages.final
        assert (final is not None) == continue_final_message, "the conversation was prepared for something else"
        if messages.error is not None:
            raise messages.error
        if continue_final_message:
            max_characters += len(CONTINUE_MARK)
        variables = {
            **(options or {}),
            "messages": messages.messages,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        frame = self._encode(
            Render(template, variables, self._now(), max_characters, choice.content_format, choice.source)
        )

        def read_answer(answer: Rendered | Failed) -> str:
            if isinstance(answer, Failed):
                raise self._error(answer, max_characters)
            return answer.text if final is None else _cut_at_mark(answer.text, final)

        short, long = self.lanes
        lane = short if len(frame) <= SHORT_CONVERSATION_BYTES else long
        return lane.submit(frame, max_characters, read_answer)

    def _template(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._names else "default"
        if name not in self._names:
            raise UserError("this model has no chat template: use completions with a plain prompt", param="messages")
        return name

    def _encode(self, request: Render) -> bytearray:
        with _encoding_errors():
            frame = encode_frame(request)
        if len(frame) > self._limits.max_conversation_bytes:
            raise UserError(
                f"the conversation has {len(frame)} bytes; a chat template is given at most "
                f"{self._limits.max_conversation_bytes}",
                param="messages",
            )
        return frame

    def _error(self, failed: Failed, max_characters: int) -> UserError:
        if failed.kind == "length":
            return PromptTooLongError(
                f"the prompt has more than {max_characters} characters, far more than the model's context holds",
                param="messages",
            )
        return UserError(f"the model's chat template {self._sentence(failed)}", param="messages")

    def _sentence(self, failed: Failed) -> str:
        """What the template does."""
        match failed.kind:
            case "invalid":
                return f"is not valid: {failed.reason}"
            case "refused":
                return f"refuses these messages: {failed.reason}"
            case "memory":
                return f"was stopped: it needs more than {format_bytes(self._limits.memory)} of memory"
            case "time":
                cpu_seconds, seconds = self._limits.cpu_seconds, self._limits.seconds
                return (
                    f"was stopped: it took too long (a conversation has {cpu_seconds:g} s of processor time "
                    f"and {seconds:g} s in all)"
                )
            case _:
                return f"failed: {failed.reason}"


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as `adapt_message` expects it: content that is a string, a list of text parts or None, calls of tools
    with their arguments decoded, and what the assistant thought under both of its names."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UserError(f"{where} must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} needs a role", param="messages")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [{"type": "text", "text": _text_of_part(part, where)} for part in content]
    elif content is not None and not isinstance(content, str):
        raise UserError(f"{where}: content must be a string or a list of parts", param="messages")
    if content is None and role not in ROLES_WITHOUT_CONTENT:
        raise UserError(f"{where} needs content", param="messages")
    plain["content"] = content
    if role == "assistant":
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_decoded_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning
    return plain


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(TEXT_OF_PART[kind]) if kind in TEXT_OF_PART else None
    if not isinstance(text, str):
        raise UserError(f"{where}: content parts must be text, not {kind or part!r:.100}", param="messages")
    return text


def _decoded_call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool whose arguments are an object, as templates expect them; clients send its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"{where} needs a function", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UserError(
                f"{where}.function.arguments is not valid JSON: {error}", param=f"{where}.function.arguments"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _mark_final(conversation: list[dict[str, Any]]) -> str:
    """Put the mark behind the text of the last message, of its last part where it has several. Returns that text."""
    final = conversation[-1]
    content = final["content"]
    if content is None or content == []:
        raise UserError("continue_final_message: the final message has no content", param="messages")
    if isinstance(content, str):
        final["content"] = content + CONTINUE_MARK
        return content.strip()
    text = str(content[-1]["text"])
    content[-1] = {"type": "text", "text": text + CONTINUE_MARK}
    return text.strip()


def _cut_at_mark(text: str, final: str) -> str:
    """Everything before the mark; without trailing space when the template trimmed the message it stood in. Raises
    UserError, as Transformers does, where the template does not write the message's text as it is."""
    before, mark, after = text.rpartition(CONTINUE_MARK.rstrip())
    if not mark or final not in text:
        raise UserError(
            "continue_final_message: the model's chat template does not write the final message as it is",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()
