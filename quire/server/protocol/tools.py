"""Tools of a chat request, and calls in its answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.server.protocol.foreign import MESSAGE_NO_EFFECT
from quire.server.protocol.sampling import SamplingFields
from quire.tokenization.conversation import check_type

MAX_TOOLS = 1024
CHOICES = ("none", "auto", "required")

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,256}$(?!\n)")]


class FunctionDefinition(msgspec.Struct, frozen=True):
    """Function of a tool. parameters: JSON schema of an object; None: no parameters."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | UnsetType | None = UNSET

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    @property
    def arguments_schema(self) -> dict[str, Any]:
        schema = self.parameters or {"properties": {}}
        return {"type": "object", **schema} if "type" not in schema and "properties" in schema else schema


class Tool(msgspec.Struct, frozen=True):
    function: FunctionDefinition
    type: str = "function"

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    def __post_init__(self) -> None:
        check_type(self.type, ("function",), "tools")

    def to_dict(self) -> dict[str, Any]:
        """Tool for the chat template: vLLM's fields, absent ones as None."""
        function: dict[str, Any] = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        if self.function.strict is not UNSET:
            function["strict"] = self.function.strict
        return {"type": self.type, "function": function}


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """Field `allowed_tools` of tool_choice. mode: "auto" or "required", among `tools` alone."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "required"):
            raise UserError(f"mode must be auto or required, not {self.mode!r}", param="mode")


class ToolChoice(msgspec.Struct, frozen=True):
    """Field `tool_choice` as an object: a function by name, or allowed functions."""

    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if self.type not in ("function", "allowed_tools"):
            raise UserError(f"type must be function or allowed_tools, not {self.type!r}", param="type")
        if getattr(self, self.type) is None:
            raise UserError(f"a tool_choice of type {self.type!r} needs {self.type}", param=self.type)


class ToolFields(SamplingFields, kw_only=True, frozen=True):
    """Generating request that may have tools.

    tool_choice: none, auto (default with tools), required, a function, or allowed tools.
        parallel_tool_calls: false keeps only the first call. include_reasoning: show the model's reasoning.
    """

    tools: Tools | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    TAKES_EMPTY_TOOLS: ClassVar[bool] = False

    def check_tools(self) -> None:
        """Raises UserError if the choice does not fit the tools; for an empty list of tools, as OpenAI does."""
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in CHOICES:
            raise UserError(
                f"tool_choice must be one of {', '.join(CHOICES)}, or name a function, not {choice!r}",
                param="tool_choice",
            )
        if self.tools == [] and not self.TAKES_EMPTY_TOOLS:
            raise UserError("tools must not be an empty list: leave the field out instead", param="tools")
        if self.tools is None and choice not in (None, "none"):
            raise UserError("when using tool_choice, tools must be set", param="tool_choice")
        known = {tool.function.name for tool in self.tools or ()}
        for name in self.chosen_names:
            if name not in known:
                raise UserError(
                    f"the tool specified in tool_choice does not match any of the specified tools: {name!r}",
                    param="tool_choice",
                )

    @property
    def chosen_names(self) -> list[str]:
        if not isinstance(self.tool_choice, ToolChoice):
            return []
        if self.tool_choice.type == "function":
            return [] if self.tool_choice.function is None else [self.tool_choice.function.name]
        allowed = self.tool_choice.allowed_tools
        return [] if allowed is None else [tool.function.name for tool in allowed.tools]

    @property
    def usable_tools(self) -> list[Tool]:
        names, tools = self.chosen_names, self.tools or []
        return [tool for tool in tools if tool.function.name in names] if names else tools

    @property
    def choice_mode(self) -> str:
        """Mode of tool_choice: none, auto, required or function."""
        if not self.tools:
            return "none"
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return choice.allowed_tools.mode if choice.allowed_tools and choice.type != "function" else "function"
        return choice or "auto"


class FunctionCall(msgspec.Struct):
    """Function of a call in an answer. arguments: JSON of an object, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """Piece of call `index`; the first piece has id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCallDelta | None = None
