"""Split of chat answers into content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from quire.errors import ConfigError, UserError
from quire.logging import get_logger
from quire.outputs import CompletionOutput
from quire.parsers.call_forms import CallKeys, Form, calls_schema, schema_form, thoughts
from quire.parsers.output import OutputDelta, call_id
from quire.parsers.parser import OutputParser, call_list, named_call, plain
from quire.parsers.reasoning import Program, ReasoningCounter, ThinkFormat, Thought
from quire.parsers.registry import (
    AUTO,
    HARMONY,
    HARMONY_CALLS,
    HARMONY_REASONING,
    NONE,
    ToolFormat,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_format,
    tool_format,
)
from quire.sampling_params import SamplingParams
from quire.server.protocol.chat import AssistantMessage, ChatRequest, Delta
from quire.server.protocol.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from quire.structured_outputs_params import Preamble, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.server.settings import ServerSettings
    from quire.tokenization.tokenizer import Tokenizer

logger = get_logger(__name__)

NO_PARSER = (
    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set: '
    "the model's chat template shows none of the known ways to write tool calls"
)

_FORCED = CallKeys(arguments="parameters")


@dataclass(frozen=True)
class AnswerFormats:
    tokenizer: Tokenizer
    tools: ToolFormat | None
    reasoning: ThinkFormat | None
    excludes_tools: bool
    """`tool_choice: none` keeps the tools out of the chat template."""
    in_reasoning: bool = False
    """Constraints begin with the first token, not after the reasoning."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ServerSettings, *, in_reasoning: bool = False) -> AnswerFormats:
        """Parsers that the settings name; `auto` (default for tool calls) detects them from the chat templates. Raises
        ConfigError for an unknown name, or if automatic tool choice finds no parser."""
        templates = list(tokenizer.chat_templates.values())
        tools, reasoning = settings.tool_call_parser or AUTO, settings.reasoning_parser or NONE
        if tools == AUTO:
            tools = detect_tool_parser(templates) or NONE
        if reasoning == AUTO:
            reasoning = detect_reasoning_parser(templates) or NONE
        if tools == NONE and settings.enable_auto_tool_choice:
            raise ConfigError(
                "enable_auto_tool_choice needs a tool_call_parser: the model's chat template shows no known way to "
                "write tool calls",
                param="tool_call_parser",
            )
        calls = None if tools == NONE else tool_format(tools)
        if calls is not None and calls.channels is not None:
            reasoning = HARMONY  # its call reader reads the reasoning too
        if (tools, reasoning) != (NONE, NONE):
            logger.info("tool calls are read as %s, reasoning as %s", tools, reasoning)
        return cls(
            tokenizer,
            calls,
            None if reasoning == NONE else reasoning_format(reasoning),
            settings.exclude_tools_when_tool_choice_none,
            in_reasoning,
        )

    def answer(self, body: ChatRequest) -> AnswerFormat:
        """Format of a request's answer. Raises UserError for tools that cannot be used."""
        return AnswerFormat(self, body)


class AnswerFormat:
    """Format (tools, reasoning, constraint) of one request's answer; `settle` completes it once the prompt is known."""

    def __init__(self, formats: AnswerFormats, body: ChatRequest) -> None:
        self._formats = formats
        self._body = body
        self._mode = body.choice_mode
        self._tools = body.usable_tools
        self._thought = Thought.FREE
        self._parsers: dict[int, OutputParser] = {}
        self._counters: dict[int, ReasoningCounter] = {}
        tools = formats.tools
        self._channels = tool_format(HARMONY_CALLS) if formats.reasoning is HARMONY_REASONING else None
        """Format of a model that writes calls, reasoning and answers in channels (Harmony)."""
        if self._mode == "auto" and tools is None:
            raise UserError(NO_PARSER, param="tool_choice")
        self._is_forced = self._mode in ("required", "function")
        has_constraint = body.to_structured_outputs() is not None
        is_format = body.constraint_field == "response_format"  # constrains content, and forced calls have none
        if self._is_forced and has_constraint and not is_format:
            raise UserError(
                f"tool_choice {self._mode!r} and {body.constraint_field} exclude one another", param="tool_choice"
            )
        can_hold = self._mode == "auto" and tools is not None and tools.held is not None
        is_strict = self._mode == "auto" and any(tool.function.strict is True for tool in self._tools)
        self._is_held = is_strict and can_hold and not has_constraint
        self._calls_or_answers = can_hold and has_constraint and is_format
        is_weak = is_strict and not (self._is_held or self._calls_or_answers)
        self.ineffective_fields = ["tools[].function.strict"] if is_weak else []
        self.constraint_field = "tools" if self._is_forced or self._is_held else body.constraint_field
        """Request field that sets the constraint on the answer."""

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        if self._mode == "none" and self._formats.excludes_tools:
            return None
        tools = self._body.tools if self._mode == "function" else self._tools
        return [tool.to_dict() for tool in tools or ()] or None

    @property
    def parses(self) -> bool:
        """True if the text may hold reasoning or tool calls."""
        return self._mode != "none" or self._formats.reasoning is not None

    @property
    def reads_calls(self) -> bool:
        return self._mode == "auto"

    def settle(self, params: SamplingParams, prompt: str | None) -> SamplingParams:
        """Find in the prompt where the model begins; return the sampling parameters to run with."""
        if not self.parses:
            return params
        reasoning = self._formats.reasoning
        if reasoning is not None and prompt is not None:
            found = params.structured_outputs
            is_held = self._is_forced or self._is_held or (found is not None and not found.start_after_token_ids)
            continues = self._body.continue_final_message
            self._thought = reasoning.thought_after(prompt, continues=continues, is_held=is_held)
        changes: dict[str, Any] = {}
        if self._has_special_markers():
            changes["skip_special_tokens"] = False
        constraint = self._constraint(params)
        if constraint is not params.structured_outputs:
            changes["structured_outputs"] = constraint
        return msgspec.structs.replace(params, **changes) if changes else params

    def read(self, completion: CompletionOutput) -> OutputDelta:
        """Split a completion's new text into content, reasoning and calls; the last piece has a finish reason."""
        if not self.parses:
            return OutputDelta(content=completion.text)
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = self._new_parser()
            self._counters[completion.index] = self._new_counter()
        self._counters[completion.index].count(completion.token_ids)
        delta = parser.feed(completion.text, is_last=completion.finish_reason is not None)
        if not self._body.include_reasoning:
            for each in (delta, *delta.parts):
                each.reasoning = ""
        return delta

    def num_calls(self, completion: CompletionOutput) -> int:
        """Number of tool calls read so far."""
        parser = self._parsers.get(completion.index)
        return 0 if parser is None else parser.num_calls

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """OpenAI's finish reason. A call that the client requested by name keeps the model's own."""
        is_call = self.num_calls(completion) > 0 and self._mode != "function"
        return "tool_calls" if is_call and completion.finish_reason == "stop" else completion.finish_reason

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens of all completions; None if the model does not reason."""
        if self._formats.reasoning is None:
            return None
        return sum(counter.num_tokens for counter in self._counters.values())

    def _new_parser(self) -> OutputParser:
        tools = self._formats.tools
        is_free = self._mode == "auto" and not (self._is_held or self._calls_or_answers)
        return OutputParser(
            self._program(),
            self._formats.reasoning if self._channels is None else None,
            breaks=tools.breaks if tools is not None and is_free else (),
            thought=self._thought,
            schemas={tool.function.name: tool.function.parameters for tool in self._tools},
            new_id=tools.new_id if tools is not None else call_id,
            max_calls=None if self._body.parallel_tool_calls else 1,
            drops=tools.around if tools is not None and self._mode == "auto" else (),
        )

    def _new_counter(self) -> ReasoningCounter:
        reasoning = self._formats.reasoning
        if reasoning is None or self._thought is Thought.CLOSED:
            return ReasoningCounter([], [], is_open=False)
        starts, ends = ([self._ids(mark) for mark in marks] for marks in (reasoning.starts, reasoning.ends))
        return ReasoningCounter(starts, ends, is_open=self._thought is Thought.OPEN)

    def _program(self) -> Program:
        tools = self._channels or self._formats.tools
        if tools is not None and (self._mode == "auto" or tools is self._channels):
            return tools.parse
        if self._mode == "required":
            return call_list
        if self._mode == "function":
            return named_call(self._tools[0].function.name)
        return plain

    def _has_special_markers(self) -> bool:
        formats = self._formats
        marks: tuple[str, ...] = () if formats.reasoning is None else formats.reasoning.markers
        for tools in (self._channels, formats.tools if self._mode == "auto" else None):
            marks += () if tools is None else tools.markers
        ids = (formats.tokenizer.token_to_id(mark) for mark in marks)
        return any(token_id is not None and formats.tokenizer.is_special(token_id) for token_id in ids)

    def _constraint(self, params: SamplingParams) -> StructuredOutputsParams | None:
        found = params.structured_outputs
        tools, parallel = self._formats.tools, self._body.parallel_tool_calls
        channels = self._channels
        if self._is_forced and channels is not None:
            assert channels.channels is not None
            return _held(channels.channels(self._schemas(), None))
        if self._is_held or (self._calls_or_answers and found is not None):
            assert tools is not None
            assert tools.held is not None
            if self._is_held:
                found = _held(tools.held(self._schemas(), parallel))
            elif found is not None and (answer := _content_form(found)) is not None:
                found = _held(tools.calls_or(self._schemas(), parallel, answer), found)
            return found if channels is not None else self._behind_thoughts(found)
        if self._mode == "required":
            found = StructuredOutputsParams(json=calls_schema(self._schemas(), _FORCED, parallel=parallel))
        elif self._mode == "function":
            found = StructuredOutputsParams(json=self._schemas()[self._tools[0].function.name])
        return self._behind_thoughts(found)

    def _behind_thoughts(self, found: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        reasoning, thought = self._formats.reasoning, self._thought
        if found is None or reasoning is None or self._formats.in_reasoning or thought is Thought.CLOSED:
            return found
        if found.start_after_token_ids or found.preamble is not None:
            return found
        if self._channels is not None:
            assert self._channels.preamble is not None
            return msgspec.structs.replace(found, preamble=Preamble(self._channels.preamble))
        tokens = {mark: ids[0] for mark in reasoning.markers if len(ids := self._ids(mark)) == 1}
        is_open = thought is Thought.OPEN
        starts = [mark for mark in reasoning.starts if mark in tokens] if is_open else reasoning.starts
        form = thoughts(starts, reasoning.ends, reasoning.around[:1], is_open=is_open)
        return msgspec.structs.replace(found, preamble=Preamble(form, tokens))

    def _schemas(self) -> dict[str, dict[str, Any]]:
        """Argument schemas by tool. With automatic choice, only strict tools constrain them."""
        return {
            function.name: function.arguments_schema
            if self._is_forced or function.strict is True
            else {"type": "object"}
            for function in (tool.function for tool in self._tools)
        }

    def _ids(self, mark: str) -> list[int]:
        return self._formats.tokenizer.encode(mark, add_special_tokens=False)


def _held(form: Form, found: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """Constraint that holds an answer to a form. found: the request's own, whose other options are kept."""
    tag = {"format": form}
    if found is None:
        return StructuredOutputsParams(structural_tag=tag)
    return msgspec.structs.replace(found, json=None, json_object=None, structural_tag=tag)


def _content_form(params: StructuredOutputsParams) -> Form | None:
    """Form of the content that `response_format` asks for; None for a structural tag, which may hold calls."""
    if params.json is not None:
        return schema_form(params.json)
    return schema_form({"type": "object"}) if params.json_object else None


class ChoiceText:
    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, delta: OutputDelta) -> None:
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        for piece in delta.tool_calls:
            if piece.id is not None and piece.name is not None:
                self._calls.append((piece.id, piece.name, []))
            self._calls[-1][2].append(piece.arguments)

    def message(self, *, has_functions: bool = False) -> AssistantMessage:
        """Message of a chat's answer. content: None if the model wrote only calls or reasoning. has_functions: use
        OpenAI's old `function_call`."""
        reasoning, content = "".join(self._reasoning) or None, "".join(self._content)
        calls = [ToolCall(identifier, FunctionCall(name, "".join(parts))) for identifier, name, parts in self._calls]
        return AssistantMessage(
            role="assistant",
            content=None if not content and (calls or reasoning) else content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls if calls and not has_functions else UNSET,
            function_call=calls[0].function if has_functions and calls else None,
        )


def to_delta(delta: OutputDelta, *, has_functions: bool = False) -> Delta:
    """Delta of a chat's chunk. has_functions: use OpenAI's old `function_call`."""
    reasoning = delta.reasoning or None
    if has_functions:
        pieces = delta.tool_calls
        call = FunctionCallDelta(pieces[0].name, "".join(piece.arguments for piece in pieces)) if pieces else None
        return Delta(
            content=delta.content or None, reasoning=reasoning, reasoning_content=reasoning, function_call=call
        )
    calls = [
        ToolCallDelta(piece.index, piece.id, "function", FunctionCallDelta(piece.name, piece.arguments))
        if piece.name is not None
        else ToolCallDelta(piece.index, function=FunctionCallDelta(arguments=piece.arguments))
        for piece in delta.tool_calls
    ]
    return Delta(content=delta.content or None, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls)
