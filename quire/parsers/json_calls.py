"""Tool calls as JSON: an object with a name and arguments, between markers or bare."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from quire.parsers.call_forms import CallKeys, Form, Schemas, call_objects, in_text, section_calls, tag
from quire.parsers.output import Output
from quire.parsers.reader import Markers, Sink, Steps, TextReader, discard
from quire.parsers.reasoning import Break

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
ID_KEYS = frozenset({"id", "tool_call_id"})
CALL_KEYS = NAME_KEYS | ARGUMENT_KEYS | ID_KEYS | {"type"}
"""Keys of a call object. Another key before the name means that the object is not a call."""
# "<" ends a broken value: JSON has none outside strings, and markers begin with it.
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SCALAR_END = re.compile(r"[\s,}\]<;]")


def copy_value(reader: TextReader, sink: Sink) -> Steps[None]:
    """Copy one JSON value; control characters in strings become escapes."""
    first = yield from reader.peek()
    if first == '"':
        sink((yield from reader.take()))
        yield from _copy_string(reader, sink)
    elif first in ("{", "["):
        yield from _copy_nested(reader, sink)
    else:
        yield from reader.scan(_SCALAR_END, sink)


def _copy_nested(reader: TextReader, sink: Sink, depth: int = 0) -> Steps[None]:
    while True:
        mark = yield from reader.scan(_STRUCTURE, sink)
        if mark in ("", "<"):
            return
        sink((yield from reader.take()))
        if mark == '"':
            yield from _copy_string(reader, sink)
            continue
        depth += 1 if mark in "{[" else -1
        if depth == 0:
            return


def _copy_string(reader: TextReader, sink: Sink) -> Steps[None]:
    while True:
        mark = yield from reader.scan(_IN_STRING, sink)
        if not mark:
            return
        if mark == "\\":
            sink((yield from reader.take(2)))
            continue
        yield from reader.take()
        sink(mark if mark == '"' else json.dumps(mark)[1:-1])
        if mark == '"':
            return


def read_value(reader: TextReader) -> Steps[str]:
    parts: list[str] = []
    yield from copy_value(reader, parts.append)
    return "".join(parts)


def string_of(text: str) -> str | None:
    """String in a JSON text; None for other values."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def copy_arguments(reader: TextReader, output: Output) -> Steps[None]:
    """Copy a value as the last call's arguments: a string of an object is unwrapped, null and a blank become {}."""
    first = yield from reader.peek()
    if first in ("{", "["):
        yield from copy_value(reader, output.arguments)
    elif first:
        output.arguments(_plain_arguments((yield from read_value(reader))))


def _plain_arguments(text: str) -> str:
    if text.strip() in ("", "null"):
        return "{}"
    inner = string_of(text)
    return inner if inner is not None and inner.lstrip().startswith("{") and _is_unicode(inner) else text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def copy_call(reader: TextReader, output: Output, is_bare: bool = False) -> Steps[str | None]:
    """Copy a call object at its opening brace. Returns None, or the text read if it is not a call. is_bare: no markers
    surround it, so it is a call only if it names a known tool."""
    yield from reader.take()
    call = _CallObject(reader, output, is_bare)
    yield from call.read()
    return call.finish()


class _CallObject:
    def __init__(self, reader: TextReader, output: Output, is_bare: bool) -> None:
        self._reader = reader
        self._output = output
        self._is_bare = is_bare
        self._raw = ["{"]
        self._identifier: str | None = None
        self._early: str | None = None
        self._is_begun = self._has_arguments = False

    def read(self) -> Steps[None]:
        reader = self._reader
        while True:
            self._raw.append((yield from reader.space()))
            mark = yield from reader.peek()
            if mark in (",", "}"):
                self._raw.append((yield from reader.take()))
                if mark == "}":
                    return
                continue
            if mark != '"':
                return
            raw_key = yield from read_value(reader)
            self._raw += [raw_key, (yield from reader.space())]
            if not (yield from reader.take_if(":")):
                return
            self._raw += [":", (yield from reader.space())]
            key = string_of(raw_key)
            if not self._is_begun and key not in CALL_KEYS:
                return
            yield from self._member(key)

    def _member(self, key: str | None) -> Steps[None]:
        reader, output = self._reader, self._output
        if key in ARGUMENT_KEYS and self._is_begun and not self._has_arguments:
            self._has_arguments = True
            yield from copy_arguments(reader, output)
            return
        value = yield from read_value(reader)
        self._raw.append(value)
        text = string_of(value)
        if key in NAME_KEYS and text and _is_unicode(text) and not self._is_begun:
            if self._is_bare and not output.knows(text):
                return
            self._is_begun = True
            output.begin_call(text, self._identifier)
            if self._early is not None:
                self._has_arguments = True
                output.arguments(_plain_arguments(self._early))
        elif key in ARGUMENT_KEYS and not self._is_begun:
            self._early = value
        elif key in ID_KEYS and text and _is_unicode(text):
            self._identifier = text

    def finish(self) -> str | None:
        if not self._is_begun:
            return "".join(self._raw)
        if not self._has_arguments and not self._reader.is_ended:
            self._output.arguments("{}")
        return None


def copy_calls(reader: TextReader, output: Output, is_bare: bool = False) -> Steps[str]:
    """Copy call objects: one, several separated by ";" or ",", or a list. Returns text that is not a call."""
    raw = yield from reader.space()
    is_list = yield from reader.take_if("[")
    raw += "[" * is_list
    found = False
    while True:
        raw += yield from reader.space()
        mark = yield from reader.peek()
        if mark == "{":
            text = yield from copy_call(reader, output, is_bare)
            if text is not None:
                return text if found else raw + text
            found = True
        elif found and mark in (",", ";"):
            yield from reader.take()
        else:
            break
    if is_list and mark == "]":
        yield from reader.take()
        return "" if found else raw + "]"
    return "" if found else raw


@dataclass(frozen=True)
class JsonFormat:
    """Format of JSON calls between markers. starts, ends: alternatives; an end may be missing. is_bare: a call at the
    beginning of the output needs no marker. is_anywhere: nor does an object that names a known tool. knows: markers
    also enclose other text, so only known tools are called. name, arguments, identifier: keys that models write ("" for
    no id). around: markers of content."""

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    is_anywhere: bool = False
    knows: bool = False
    name: str = "name"
    arguments: str = "arguments"
    identifier: str = ""
    around: tuple[str, ...] = ()

    @property
    def breaks(self) -> tuple[Break, ...]:
        named = ("{",), ('"name"',), (":",)
        listed = (Break("[", named, '"{}"'),) if self.is_bare else ()
        bare = (Break("{", named[1:], '"{}"'),) if self.is_anywhere else ()
        return (*(Break(start, (("{", "["),)) for start in self.starts), *listed, *bare)

    @property
    def markers(self) -> tuple[str, ...]:
        return self.starts + self.ends + self.around

    def held(self, schemas: Schemas, parallel: bool) -> Form:
        content = call_objects(schemas, CallKeys(self.name, self.arguments, self.identifier), parallel)
        return in_text([tag(start, content, (*self.ends, "")) for start in self.starts], parallel)

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        is_anywhere = self.is_anywhere and bool(output.schemas)
        if self.is_bare and (yield from self._begins_bare(reader, output, is_anywhere)):
            yield from self._block(reader, output, "")
        starts = Markers(*self.starts, "{") if is_anywhere else Markers(*self.starts)
        while True:
            start = yield from output.until(reader, starts)
            if start is None:
                return
            if start == "{":
                reader.unread(start)
                yield from self._object(reader, output)
            else:
                yield from self._block(reader, output, start)

    def _begins_bare(self, reader: TextReader, output: Output, is_anywhere: bool) -> Steps[bool]:
        output.content((yield from reader.space()))
        for start in self.starts:
            if (yield from reader.sees(start)):
                return False
        first = yield from reader.peek()
        return first == "[" if output.ends or is_anywhere else True

    def _object(self, reader: TextReader, output: Output) -> Steps[None]:
        before = output.num_calls
        left = yield from copy_calls(reader, output, is_bare=True)
        output.content(left)
        if output.num_calls == before and not left.endswith("}"):
            yield from _copy_nested(reader, output.content, depth=1)

    def _block(self, reader: TextReader, output: Output, start: str) -> Steps[None]:
        before = output.num_calls
        left = yield from copy_calls(reader, output, self.knows or not start)
        is_empty = bool(start) and "".join(left.split()) == "[]"
        if output.num_calls == before and not is_empty:
            output.content(start + left)
            return
        output.content("" if is_empty else left)
        space = yield from reader.space()
        for end in self.ends:
            if (yield from reader.take_if(end)):
                return
        output.content(space)


def parse_mistral(reader: TextReader, output: Output) -> Steps[None]:
    """Parse `[TOOL_CALLS]` before a list of call objects or before each `name[CALL_ID]id[ARGS]{...}`, with id and
    `[ARGS]` optional."""
    start = "[TOOL_CALLS]"
    arguments = Markers("[ARGS]", "[CALL_ID]", start, "{", *output.ends)
    while (yield from output.until(reader, Markers(start))) is not None:
        space = yield from reader.space()
        if (yield from reader.peek()) in ("[", "{"):
            before = output.num_calls
            left = yield from copy_calls(reader, output)
            output.content(left if output.num_calls > before else start + space + left)
            continue
        parts: list[str] = []
        mark = yield from reader.until(arguments, parts.append)
        name, identifier = "".join(parts), None
        if mark not in ("[ARGS]", "[CALL_ID]", "{") or not output.may_call(name.strip()):
            output.content(start + space + name)
            reader.unread(mark or "")
            continue
        if mark == "[CALL_ID]":
            parts = []
            mark = yield from reader.until(arguments, parts.append)
            identifier = "".join(parts).strip()
        if mark != "[ARGS]":
            reader.unread(mark or "")
        output.begin_call(name.strip(), identifier)
        yield from reader.space()
        if mark in ("[ARGS]", "{"):
            yield from copy_arguments(reader, output)


@dataclass(frozen=True)
class SectionFormat:
    """Section of calls, each with header, separator and JSON: DeepSeek-V3 and V3.1, Kimi-K2."""

    section: str
    section_end: str
    call: str
    separator: str
    call_end: str

    @property
    def breaks(self) -> tuple[Break, ...]:
        return (Break(self.section, ((self.call,),)),)

    @property
    def markers(self) -> tuple[str, str, str, str, str]:
        return self.section, self.section_end, self.call, self.separator, self.call_end

    def held(self, schemas: Schemas, parallel: bool) -> Form:
        return section_calls(self.markers, schemas, parallel)

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        outside, inside = Markers(self.section, self.call), Markers(self.section_end, self.call, *output.ends)
        while (mark := (yield from output.until(reader, outside))) is not None:
            while mark in (self.section, self.call):
                if mark == self.call:
                    yield from self._call(reader, output)
                mark = yield from reader.until(inside, discard)
            if mark in output.ends:
                reader.unread(mark)

    def _call(self, reader: TextReader, output: Output) -> Steps[None]:
        header: list[str] = []
        ends = Markers(self.separator, self.call_end, self.section_end, self.call, *output.ends)
        mark = yield from reader.until(ends, header.append)
        if mark != self.separator:
            output.content(self.call + "".join(header))
            if mark is not None and mark != self.call_end:
                reader.unread(mark)
            return
        name, identifier = _header_name("".join(header))
        yield from reader.space()
        if (yield from reader.peek()) != "{" and name == "function":
            # DeepSeek-V3: the kind, the separator, the name, and JSON in a code block.
            parts: list[str] = []
            fence = yield from reader.until(Markers("```json", "{", self.call_end, *output.ends), parts.append)
            name = "".join("".join(parts).split()[:1])
            if fence is not None and fence != "```json":
                reader.unread(fence)
            yield from reader.space()
        if not name:
            output.content(self.call + "".join(header) + self.separator)
            return
        output.begin_call(name, identifier)
        if (yield from reader.peek()) in ("{", "["):
            yield from copy_value(reader, output.arguments)
        elif not reader.is_ended:
            output.arguments("{}")


def _header_name(header: str) -> tuple[str, str | None]:
    header = header.strip()
    name, colon, number = header.rpartition(":")
    if colon and number.isdigit():
        return name.removeprefix("functions."), header
    return header, None
