"""Form of messages that a chat template expects, by its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

IMAGES = ("image", "video")


class ImagesRefusedError(Exception):
    """Error of a message with images: the template takes message content as one string."""


def wants_parts(tree: nodes.Template) -> bool:
    """True if the template loops over a message's parts."""
    conversations = {"messages"}
    while names := {target for target, value in _assignments(tree) if _stem(value) in conversations} - conversations:
        conversations |= names
    loops = [(loop.target, loop.iter) for loop in tree.find_all(nodes.For)]
    messages = {
        target.name for target, value in loops if isinstance(target, nodes.Name) and _stem(value) in conversations
    }
    return any(_stem(value, "content") in messages for _, value in loops)


def knows_role(tree: nodes.Template, role: str) -> bool:
    return any(constant.value == role for constant in tree.find_all(nodes.Const))


def adapt_message(message: dict[str, Any], *, as_parts: bool, knows_developer: bool) -> dict[str, Any]:
    """Convert a message (conversation.py) for one template. Its content becomes a string (texts joined by line feeds)
    or, with `as_parts`, a list of parts; a tool's message stays a string unless it has images. Raises
    ImagesRefusedError for images in a string."""
    parts = message["content"] or []
    role, has_images = message["role"], any(part["type"] in IMAGES for part in parts)
    content: Any
    if as_parts and (role != "tool" or has_images):
        content = [{"type": part["type"]} if part["type"] in IMAGES else part for part in parts]
    elif has_images:
        raise ImagesRefusedError("it takes text alone, and a message has an image")
    else:
        content = "\n".join(part["text"] for part in parts)
    adapted = {"role": role, "content": content, **message["fields"]}
    if role == "developer" and not knows_developer:
        adapted["role"] = "system"
        adapted.pop("tools", None)
    return adapted


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _attribute(node: nodes.Getattr | nodes.Getitem) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None


def _stem(node: nodes.Node | None, attribute: str | None = None) -> str | None:
    """Variable of an expression, under filters, tests and slices; with `attribute`, the variable whose attribute or
    item it is. None: another expression."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if attribute is not None:
        if not (isinstance(node, nodes.Getattr | nodes.Getitem) and _attribute(node) == attribute):
            return None
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None
