"""What a chat template expects of a message, found in its syntax tree, and messages made so.

A template that loops over the content of a message wants a list of parts, any other a string. Loops are followed as
vLLM follows them, so that a conversation has the same tokens here and there: `messages` and variables that are assigned
from it, loops over them, and loops over `message.content` or `message["content"]` inside, through filters and slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

IMAGE = "image"
"""Type of a part that stands for an image."""


class ImagesRefusedError(Exception):
    """The template takes the content of messages as one string."""


def wants_parts(tree: nodes.Template) -> bool:
    """Whether the template loops over the parts of a message's content."""
    conversations = {"messages"}
    while names := {target for target, value in _assignments(tree) if _stem(value) in conversations} - conversations:
        conversations |= names
    loops = [(loop.target, loop.iter) for loop in tree.find_all(nodes.For)]
    messages = {
        target.name for target, value in loops if isinstance(target, nodes.Name) and _stem(value) in conversations
    }
    return any(_stem(value, "content") in messages for _, value in loops)


def knows_role(tree: nodes.Template, role: str) -> bool:
    """Whether the template mentions a role by name."""
    return any(constant.value == role for constant in tree.find_all(nodes.Const))


def adapt_message(message: dict[str, Any], *, as_parts: bool, knows_developer: bool) -> dict[str, Any]:
    """A message (conversation.py) for one template. Its content, a list of text parts or None, becomes a string (texts
    are joined by line feeds), or with `as_parts` a list of parts; of a tool's message a string, unless it has images. A
    developer's message is the system's where the template does not know developers. Raises ImagesRefusedError for
    images in what becomes a string."""
    parts = message["content"] or []
    role, has_images = message["role"], any(part["type"] == IMAGE for part in parts)
    content: Any
    if as_parts and (role != "tool" or has_images):
        content = [{"type": IMAGE} if part["type"] == IMAGE else part for part in parts]
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
    """(name, value) of each `set` of one variable."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _attribute(node: nodes.Getattr | nodes.Getitem) -> object:
    """The name of the attribute, or the item's constant key; None for an item whose key is computed."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None


def _stem(node: nodes.Node | None, attribute: str | None = None) -> str | None:
    """The variable that an expression is, beneath filters, tests and slices; with `attribute` the variable whose
    attribute or item of that name it is. None for any other expression."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if attribute is not None:
        if not (isinstance(node, nodes.Getattr | nodes.Getitem) and _attribute(node) == attribute):
            return None
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None
