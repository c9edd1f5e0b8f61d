"""The items of /v1/responses that a conversation consists of: as requests send them, as chat messages, as listed."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.multimodal.sources import IMAGE_OF_PART, Picture, picture_of
from quire.server.errors import invalid_request
from quire.server.protocol.common import ShortString
from quire.server.protocol.messages import MAX_MESSAGES, check_role
from quire.server.protocol.response_tools import flat_name
from quire.tokenization.conversation import Messages, check_type, decoded_arguments, messages_of, text_of_part

_MEDIA = ("file_id", "file_data", "file_url", "filename", "input_audio")
_ITEM_NO_EFFECT = frozenset(
    {
        "status",
        "phase",
        "encrypted_content",
        "caller",
        "async",
        "created_by",
        "internal_chat_message",
    }
)
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
"""Type of an item -> the fields that it cannot be without."""
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class Part(msgspec.Struct, frozen=True):
    """A part of a message, of a tool's output or of thoughts."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = dict.fromkeys(_MEDIA, ())

    def to_dict(self) -> dict[str, Any]:
        """What was given."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class InputItem(msgspec.Struct, frozen=True):
    """message, function_call, function_call_output, reasoning, or item_reference to one of a stored response; without a
    type a message. id: of an item_reference; other items get ids of their own. namespace: of the function that a
    function_call calls."""

    type: str = "message"
    id: ShortString | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: ShortString | None = None
    name: ShortString | None = None
    namespace: ShortString | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = _ITEM_NO_EFFECT

    def __post_init__(self) -> None:
        check_type(self.type, _NEEDED, "items")
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise UserError(f"an item of type {self.type!r} needs {name}", param=name)
        if self.type == "message":
            check_role(self.role or "")


_encoder = msgspec.json.Encoder()

Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


def items_of(given: str | list[InputItem]) -> list[InputItem]:
    """The items that the `input` of a request stands for."""
    return [InputItem(role="user", content=given)] if isinstance(given, str) else given


def chat_messages_of(items: Sequence[InputItem], num_before: int = 0) -> list[dict[str, Any]]:
    """The chat messages that items mean; no item_reference may be among them. Thoughts, text and calls that follow one
    another are one message of the assistant. num_before: leading items that are not of the request's `input`.

    Raises UserError with the place in `input`."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items, -num_before):
        where = f"input[{index}]"
        if item.type == "function_call_output":
            content = _parts(item.output, f"{where}.output")
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.type == "message" and item.role != "assistant":
            found.append({"role": item.role, "content": _parts(item.content, f"{where}.content")})
        else:
            _add_to_assistant(found, item, where)
    return found


def messages_of_items(items: Sequence[InputItem], instructions: str | None, num_before: int = 0) -> Messages:
    """The conversation that goes on from `items`: those of the conversation before, of which there are `num_before`,
    and those of `input`. Raises UserError."""
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return messages_of([*system, *chat_messages_of(items, num_before)], "input")


def listed(item: InputItem, item_id: str) -> dict[str, Any]:
    """An item as /input_items lists it and as the store keeps it."""
    head = {"id": item_id, "type": item.type, "status": "completed"}
    match item.type:
        case "message":
            kind = "output_text" if item.role == "assistant" else "input_text"
            return {**head, "role": item.role, "content": _listed_parts(item.content, kind)}
        case "function_call":
            space = {} if item.namespace is None else {"namespace": item.namespace}
            return {**head, "call_id": item.call_id, "name": item.name, **space, "arguments": item.arguments}
        case "function_call_output":
            is_text = isinstance(item.output, str)
            output = item.output if is_text else _listed_parts(item.output, "input_text")
            return {**head, "call_id": item.call_id, "output": output}
    content = _listed_parts(item.content, "reasoning_text")
    return {**head, "summary": _listed_parts(item.summary, "summary_text"), "content": content}


def input_item_id(item: InputItem, name: str, index: int) -> str:
    """The id of the `index`th input item of the response resp_`name`. `response_of_item` finds the response again."""
    return f"{_ID_PREFIXES[item.type]}_{name}_in{index}"


def response_of_item(item_id: str) -> str:
    """The id of the response that an item, of its input or its output, belongs to."""
    return "resp_" + item_id.partition("_")[2].rpartition("_")[0]


class Listing(NamedTuple):
    """The conversation that a response answers, as /input_items lists it. items: a JSON list of `num_items`, in whose
    ids `name` stands for the name of the response: large ones are stored as a helper has written them."""

    items: bytes = b"[]"
    num_items: int = 0
    name: str = ""
    response_id: str = ""

    def decoded(self) -> list[dict[str, Any]]:
        """The items."""
        written = self.items
        if self.name:
            written = written.replace(self.name.encode(), _encoder.encode(self.response_id.removeprefix("resp_"))[1:-1])
        found: list[dict[str, Any]] = msgspec.json.decode(written)
        return found


class ListedItems(msgspec.Struct, tag=True):
    """The Listing of a request that was read, before the response has an id: `name` stands in the items' ids for that
    of the response."""

    items: bytes
    num_items: int
    name: str

    @classmethod
    def of(cls, given: list[InputItem], before: Sequence[Any] = ()) -> ListedItems:
        """before: the conversation that is gone on from, as listed."""
        name = secrets.token_hex(16)  # found nowhere in the items, and in need of no escapes
        added = [listed(item, input_item_id(item, name, index)) for index, item in enumerate(given)]
        return cls(_encoder.encode([*before, *added]), len(before) + len(added), name)

    def listing(self, response_id: str) -> Listing:
        return Listing(self.items, self.num_items, self.name, response_id)


class UnresolvedItems(msgspec.Struct, tag=True):
    """The items of a request that goes on from stored responses, as JSON. response_ids: of the responses that its
    item_references are of."""

    items: bytes
    response_ids: list[str]


class ReadInput(str):
    """The `input` of a body that was read (quire/server/reading.py): its conversation and the items to list, or where
    it goes on from stored responses, no messages yet."""

    messages: Messages | None
    items: ListedItems | UnresolvedItems

    def __new__(cls, messages: Messages | None, items: ListedItems | UnresolvedItems) -> ReadInput:
        given = super().__new__(cls)
        given.messages, given.items = messages, items
        return given


class StoredItems(NamedTuple):
    """The conversation up to the end of a response. added: the items of the answer, a JSON list."""

    before: Listing = Listing()
    added: bytes = b"[]"

    @property
    def num_bytes(self) -> int:
        return len(self.before.items) + len(self.added)

    def decoded(self) -> list[dict[str, Any]]:
        """All items, as they are listed."""
        return [*self.before.decoded(), *msgspec.json.decode(self.added)]


class Continuation(msgspec.Struct):
    """How the items of a request go on from stored responses: the one before, and those of `response_ids`, which its
    item_references are of. marks: name and response of each one's Listing. lengths: of the parts of the content."""

    instructions: str | None
    response_ids: list[str]
    marks: list[tuple[str, str]]
    lengths: list[int]

    @classmethod
    def of(
        cls, instructions: str | None, given: UnresolvedItems, before: StoredItems, known: list[StoredItems]
    ) -> tuple[Continuation, list[bytes]]:
        """With the content, in its parts. known: of `given.response_ids`."""
        stored = [before, *known]
        content = [given.items, *(part for each in stored for part in (each.before.items, each.added))]
        marks = [(each.before.name, each.before.response_id) for each in stored]
        return cls(instructions, given.response_ids, marks, [len(part) for part in content]), content

    def join(self, content: bytes) -> tuple[Messages, ListedItems]:
        """The whole conversation, and what there is to list. Raises UserError, and ApiError (404) for an
        item_reference to an item that is not stored."""
        ends = itertools.accumulate(self.lengths)
        given_items, *parts = (content[end - size : end] for size, end in zip(self.lengths, ends, strict=True))
        pairs = zip(self.marks, parts[::2], parts[1::2], strict=True)
        before, *known = (StoredItems(Listing(items, 0, *mark), added).decoded() for mark, items, added in pairs)
        of_responses = zip(known, self.response_ids, strict=True)
        by_id = {
            item["id"]: item for found, name in of_responses for item in found if response_of_item(item["id"]) == name
        }
        given = msgspec.json.decode(given_items, type=list[InputItem])
        for index, item in enumerate(given):
            if item.type == "item_reference":
                if item.id not in by_id:
                    message = f"no item {item.id!r} is stored: its response never was, was deleted, or had to leave"
                    raise invalid_request(message, param=f"input[{index}].id", code="item_not_found", status=404)
                given[index] = msgspec.convert(by_id[item.id], InputItem)
        items_of_all = [*msgspec.convert(before, list[InputItem]), *given]
        return messages_of_items(items_of_all, self.instructions, len(before)), ListedItems.of(given, before)


def _listed_parts(content: str | Sequence[Part] | None, kind: str) -> list[dict[str, Any]]:
    parts = [Part(kind, content)] if isinstance(content, str) else content or ()
    found: list[dict[str, Any]] = []
    for part in parts:
        if part.type == "refusal":
            found.append({"type": part.type, "refusal": part.refusal})
        elif part.type == "output_text":
            found.append({"type": part.type, "text": part.text, "annotations": []})
        elif part.type in IMAGE_OF_PART:
            found.append({"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"})
        else:
            found.append({"type": part.type, "text": part.text})
    return found


def _add_to_assistant(found: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add thoughts, text or a call to the last message, or begin a new one where that has such a part already."""
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if item.type == "function_call":
        if last is None:
            found.append(last := {"role": "assistant", "content": None})
        name = item.name if item.namespace is None else flat_name(item.namespace, item.name or "")
        function = {"name": name, "arguments": decoded_arguments(item.arguments, f"{where}.arguments")}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        return
    field = "reasoning" if item.type == "reasoning" else "content"
    if last is None or last.get("tool_calls") or last.get("content") is not None:
        found.append(last := {"role": "assistant", "content": None})
    parts = (item.content or item.summary or []) if field == "reasoning" else (item.content or "")
    if isinstance(parts, str):
        text = parts
    else:
        path = f"{where}.content" if item.content else f"{where}.summary"
        text = "".join(text_of_part(part.to_dict(), f"{path}[{index}]") for index, part in enumerate(parts))
    last[field] = last[field] + text if last.get(field) else text


def _parts(content: str | list[Part] | None, where: str) -> str | list[dict[str, str] | Picture]:
    if content is None or isinstance(content, str):
        return content or ""
    found: list[dict[str, str] | Picture] = []
    for index, part in enumerate(content):
        given, place = part.to_dict(), f"{where}[{index}]"
        picture = picture_of(given, place)
        found.append({"type": "text", "text": text_of_part(given, place)} if picture is None else picture)
    return found
