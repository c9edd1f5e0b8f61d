"""Tools of /v1/responses, and their conversion to the chat endpoint's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import UserError
from quire.server.protocol.common import ShortString
from quire.tokenization.conversation import check_type

SEPARATOR = "__"


def flat_name(namespace: str, name: str) -> str:
    """Name by which the model calls a function of a namespace."""
    return f"{namespace}{SEPARATOR}{name}"


class ResponseTool(msgspec.Struct, frozen=True):
    """Function of the client, or a namespace with functions in `tools`. OpenAI's server tools have other types."""

    type: str
    name: ShortString | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | UnsetType = UNSET

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "defer_loading", "output_schema"})

    def __post_init__(self) -> None:
        check_type(self.type, ("function", "namespace"), "tools")
        if self.name is None:
            raise UserError(f"a tool of type {self.type!r} needs a name", param="name")
        if (self.type == "namespace") != (self.tools is not UNSET):
            raise UserError("a namespace has tools, and a function has none", param="tools")
        if self.tools is not UNSET and any(tool.type != "function" for tool in self.tools):
            raise UserError("the tools of a namespace must be of type 'function'", param="tools")

    def to_chat(self) -> list[dict[str, Any]]:
        """Functions for the chat completion that show this tool to the model."""
        if self.tools is not UNSET:
            assert self.name is not None
            members = [msgspec.structs.replace(tool, name=flat_name(self.name, tool.name or "")) for tool in self.tools]
            return [function for tool in members for function in tool.to_chat()]
        fields = ("name", "description", "parameters", "strict")
        function = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return [{"type": "function", "function": function}]


def namespaces_of(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Functions of namespaces: name for the model -> (namespace, name)."""
    return {
        flat_name(tool.name or "", member.name or ""): (tool.name or "", member.name or "")
        for tool in tools
        if tool.tools is not UNSET
        for member in tool.tools
    }


class NamedTool(msgspec.Struct, frozen=True):
    """tool_choice: a function, or `allowed_tools` with a mode and a list. A function of a namespace has its name for
    the model, or its own if unique."""

    type: str
    name: ShortString | None = None
    mode: ShortString | None = None
    tools: list[dict[str, Any]] | None = None

    def to_chat(self, tools: Sequence[ResponseTool]) -> dict[str, Any]:
        if self.type == "function" and self.name is not None:
            return {"type": "function", "function": {"name": _meant(self.name, tools)}}
        if self.type == "allowed_tools" and self.tools:
            allowed = [
                {"type": "function", "function": {"name": _meant(tool.get("name"), tools)}} for tool in self.tools
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode or "auto", "tools": allowed}}
        raise UserError(
            f"tool_choice of type {self.type!r} is not supported (only 'function' with a name and 'allowed_tools' are)",
            param="tool_choice",
        )


def _meant(name: Any, tools: Sequence[ResponseTool]) -> Any:
    if any(tool.name == name and tool.type == "function" for tool in tools):
        return name
    found = [flat for flat, (_, own) in namespaces_of(tools).items() if own == name]
    if len(found) > 1:
        raise UserError(f"tool_choice: {name!r} is in several namespaces: {', '.join(found)}", param="tool_choice")
    return found[0] if found else name
