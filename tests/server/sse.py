"""Reading server-sent events back."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The events of a whole stream: parsed objects, and the string "[DONE]". Checks the framing."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream must end with an empty line"
    found = []
    for block in blocks:
        assert block.startswith("data: "), block
        assert "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chunks(text: str) -> list[Any]:
    """The chunks of a stream that ended well."""
    *found, last = events(text)
    assert last == "[DONE]"
    return found
