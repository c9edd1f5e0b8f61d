"""Items of a /v1/responses conversation: as requested, as chat messages, as listed."""

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
"""Type of an item -> its required fields."""
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ItemPart(msgspec.Struct, frozen=True):
    """Part of a message, tool output or reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = dict.fromkeys(_MEDIA, ())

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class InputItem(msgspec.Struct, frozen=True):
    """Item of type message (the default), function_call, function_call_output, reasoning, or item_reference to a stored
    item. id: only for item_reference; other items get new ids. namespace: that of the called function."""

    type: str = "message"
    id: ShortString | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: ShortString | None = None
    name: ShortString | None = None
    namespace: ShortString | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None

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
    return [InputItem(role="user", content=given)] if isinstance(given, str) else given


def chat_messages_of(items: Sequence[InputItem], num_before: int = 0) -> list[dict[str, Any]]:
    """Convert items, without item_references, to chat messages. Consecutive reasoning, text and calls form one message
    of the assistant. num_before: number of leading items that precede `input`. Raises UserError with the place in
    `input`."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items, -num_before):
        where = f"input[{index}]"
        if item.type == "function_call_output":
            content = _parts(item.output, f"{where}.output")
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.type == "message" and item.role != "assistant":
            found.append({"role": item.role, "content": _parts(item.content, f"{where}.content")})
        else:
            _add_to_assistant(found, item, where, is_stored=index < 0)
    return found


def messages_of_items(items: Sequence[InputItem], instructions: str | None, num_before: int = 0) -> Messages:
    """Conversation of `items`: `num_before` from earlier, then those of `input`. Raises UserError."""
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return messages_of([*system, *chat_messages_of(items, num_before)], "input")


def listed(item: InputItem, item_id: str) -> dict[str, Any]:
    """Item in the form of /input_items and of the store."""
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
    """Id of input item `index` of the response resp_`name`; `response_of_item` inverts it."""
    return f"{_ID_PREFIXES[item.type]}_{name}_in{index}"


def response_of_item(item_id: str) -> str:
    """Id of the response that an input or output item belongs to."""
    return "resp_" + item_id.partition("_")[2].rpartition("_")[0]


class Listing(NamedTuple):
    """Conversation of a response, in the form of /input_items. items: JSON list of `num_items`, as the helper wrote it;
    `name` in its ids stands for the response's name."""

    items: bytes = b"[]"
    num_items: int = 0
    name: str = ""
    response_id: str = ""

    def decoded(self) -> list[dict[str, Any]]:
        written = self.items
        if self.name:
            written = written.replace(self.name.encode(), _encoder.encode(self.response_id.removeprefix("resp_"))[1:-1])
        found: list[dict[str, Any]] = msgspec.json.decode(written)
        return found


class ListedItems(msgspec.Struct, tag=True):
    """Listing of a parsed request that has no response id yet: `name` stands for it in the items' ids."""

    items: bytes
    num_items: int
    name: str

    @classmethod
    def of(cls, given: list[InputItem], before: Sequence[Any] = ()) -> ListedItems:
        """Listing of parsed items `given`. before: listed items of the earlier conversation."""
        name = secrets.token_hex(16)  # occurs nowhere in the items, needs no escapes
        added = [listed(item, input_item_id(item, name, index)) for index, item in enumerate(given)]
        return cls(_encoder.encode([*before, *added]), len(before) + len(added), name)

    def listing(self, response_id: str) -> Listing:
        return Listing(self.items, self.num_items, self.name, response_id)


class UnresolvedItems(msgspec.Struct, tag=True):
    """Items of a request that continues stored responses, as JSON. response_ids: responses that its item_references
    point into."""

    items: bytes
    response_ids: list[str]


class ReadInput(str):
    """Parsed `input` (quire/server/reading.py): messages and items to list; no messages yet if it continues stored
    responses."""

    messages: Messages | None
    items: ListedItems | UnresolvedItems

    def __new__(cls, messages: Messages | None, items: ListedItems | UnresolvedItems) -> ReadInput:
        given = super().__new__(cls)
        given.messages, given.items = messages, items
        return given


class StoredItems(NamedTuple):
    """Conversation up to a response's end. added: answer's items, a JSON list."""

    before: Listing = Listing()
    added: bytes = b"[]"

    @property
    def num_bytes(self) -> int:
        return len(self.before.items) + len(self.added)

    def decoded(self) -> list[dict[str, Any]]:
        return [*self.before.decoded(), *msgspec.json.decode(self.added)]


class Continuation(msgspec.Struct):
    """Orders to join a request's items with stored responses (previous, and item_references' `response_ids`), maybe in
    a helper. marks: name and response id of each Listing. lengths: bytes of content's parts."""

    instructions: str | None
    response_ids: list[str]
    marks: list[tuple[str, str]]
    lengths: list[int]

    @classmethod
    def of(
        cls, instructions: str | None, given: UnresolvedItems, before: StoredItems, known: list[StoredItems]
    ) -> tuple[Continuation, list[bytes]]:
        """Continuation and its content in parts. known: stored items of `given.response_ids`."""
        stored = [before, *known]
        content = [given.items, *(part for each in stored for part in (each.before.items, each.added))]
        marks = [(each.before.name, each.before.response_id) for each in stored]
        return cls(instructions, given.response_ids, marks, [len(part) for part in content]), content

    def join(self, content: bytes) -> tuple[Messages, ListedItems]:
        """Whole conversation, and its listing. Raises UserError; ApiError (404) for a reference to an unknown item."""
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


def _listed_parts(content: str | Sequence[ItemPart] | None, kind: str) -> list[dict[str, Any]]:
    parts = [ItemPart(kind, content)] if isinstance(content, str) else content or ()
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


def _add_to_assistant(found: list[dict[str, Any]], item: InputItem, where: str, *, is_stored: bool) -> None:
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if item.type == "function_call":
        if last is None:
            found.append(last := {"role": "assistant", "content": None})
        name = item.name if item.namespace is None else flat_name(item.namespace, item.name or "")
        try:
            arguments = decoded_arguments(item.arguments, f"{where}.arguments")
        except UserError:
            if not is_stored:
                raise
            arguments = {}  # the model's own, or cut by a limit: templates read objects
        function = {"name": name, "arguments": arguments}
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


def _parts(content: str | list[ItemPart] | None, where: str) -> str | list[dict[str, str] | Picture]:
    if content is None or isinstance(content, str):
        return content or ""
    found: list[dict[str, str] | Picture] = []
    for index, part in enumerate(content):
        given, place = part.to_dict(), f"{where}[{index}]"
        picture = picture_of(given, place)
        found.append({"type": "text", "text": text_of_part(given, place)} if picture is None else picture)
    return found
