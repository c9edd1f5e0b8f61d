"""GPT-OSS's messages with a channel and a recipient: `analysis` is reasoning, a message to a recipient is a tool call,
`final` and the rest of `commentary` are content.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>`
"""

from __future__ import annotations

import re

from quire.parsers.output import Output
from quire.parsers.reader import Markers, Steps, TextReader

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_MESSAGE = Markers("<|message|>")
_ENDS = Markers("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


def parse_harmony(reader: TextReader, output: Output) -> Steps[None]:
    """Parse after `<|start|>assistant`, which ends the prompt."""
    has_reasoned = False
    has_header = yield from _begins_header(reader)
    while True:
        header: list[str] = []
        if has_header and (yield from reader.until(_MESSAGE, header.append)) is None:
            return
        text = "".join(header)
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        if recipient is not None and recipient[1] != "assistant":
            mark = yield from _call(reader, output, recipient[1])
        elif channel is not None and channel[1] == "analysis":
            if has_reasoned:
                output.reasoning("\n")
            has_reasoned = True
            mark = yield from reader.until(_ENDS, output.reasoning, drops_part=True)
        else:
            mark = yield from reader.until(_ENDS, output.content, drops_part=True)
        if mark is None:
            return
        if mark == "<|channel|>":
            reader.unread(mark)
            has_header = True
        else:
            yield from reader.space()
            has_header = mark == "<|start|>" or (yield from _begins_header(reader))


def _begins_header(reader: TextReader) -> Steps[bool]:
    for beginning in ("<|channel|>", "<|start|>", " to="):
        if (yield from reader.sees(beginning)):
            return True
    return False


def _call(reader: TextReader, output: Output, recipient: str) -> Steps[str | None]:
    output.begin_call(recipient.removeprefix("functions."))
    yield from reader.space()
    num_pieces = 0

    def add(text: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        output.arguments(text)

    mark = yield from reader.until(_ENDS, add, drops_part=True)
    if not num_pieces and mark is not None:
        output.arguments("{}")
    return mark
