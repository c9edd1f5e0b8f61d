"""llama.cpp's adapters: files of --lora and --lora-scaled by number, with their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import NO_SUMS, FileScale, open_adapter, scaled
from quire.config.adapters import AdaptersConfig
from quire.errors import UserError
from quire.server.auth import admin
from quire.server.body import parse_fields, read_body
from quire.server.context import may_use
from quire.server.errors import invalid_request
from quire.server.protocol.common import LoraScale, RequestStruct
from quire.server.shared_adapters import Numbered, NumberedAdapter, OneProcess, SharedTable

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_encoder = msgspec.json.Encoder()
MAX_SCALES = 1024


class NumberedAdapters:
    """Adapters by number, in the order of the options."""

    def __init__(self, shared: SharedTable[int, NumberedAdapter] | None = None) -> None:
        self._shared = shared or OneProcess()
        self._known: Numbered = {}

    def open(self, files: Sequence[FileScale], limits: AdaptersConfig) -> list[AdapterRef]:
        """Read the files, unless another process has. Raises UserError as `open_adapter` does."""
        for number, file in enumerate(files):
            ref = msgspec.structs.replace(open_adapter(file.path, limits), name=Path(file.path).name)
            self._put(number, NumberedAdapter(ref, file.scale))
        return [each.ref for each in self.usable().values()]

    def _put(self, number: int, adapter: NumberedAdapter) -> None:
        def put(table: Numbered) -> None:
            table.setdefault(number, adapter)

        put(self._known)
        self._shared.change(put)

    def usable(self) -> Numbered:
        """Adapters that this request's client may use."""
        if (news := self._shared.news()) is not None:
            self._known = news
        return {number: each for number, each in self._known.items() if may_use(each.ref.name)}

    def chosen(self, lora: Sequence[LoraScale] | None) -> AdapterRef | None:
        """Adapter of a request, with its scale; None: none. lora: None means the adapters' own scales. Raises UserError
        for an unknown number or a sum."""
        if not self._known and not lora:
            return None
        usable = self.usable()
        scales = _scales(usable, lora) if lora else {number: each.scale for number, each in self._known.items()}
        for number, scale in scales.items():
            if scale:
                return scaled(self._known[number].ref, scale)
        return None

    def change(self, lora: Sequence[LoraScale]) -> None:
        """Set the scales of requests that name none; others get 0. Raises UserError as `chosen` does."""
        scales = _scales(self.usable(), lora)

        def put(table: Numbered) -> None:
            for number, each in table.items():
                table[number] = NumberedAdapter(each.ref, scales.get(number, 0.0))

        put(self._known)
        self._shared.change(put)


def _scales(usable: Mapping[int, NumberedAdapter], lora: Sequence[LoraScale]) -> dict[int, float]:
    scales: dict[int, float] = {}
    for each in lora:
        if each.id not in usable:
            known = ", ".join(map(str, usable)) or "none"
            raise UserError(f"lora: no adapter has the id {each.id} (ids: {known})", param="lora")
        scales[each.id] = each.scale
    if sum(scale != 0 for scale in scales.values()) > 1:
        raise UserError(f"lora: {NO_SUMS}", param="lora")
    return scales


class LoraFile(msgspec.Struct):
    """path: the file's name. scale: for requests that name none."""

    id: int
    path: str
    scale: float


class LoraScales(RequestStruct, kw_only=True, frozen=True):
    lora: Annotated[list[LoraScale], Meta(max_length=MAX_SCALES)]


class ScalesSet(msgspec.Struct):
    success: bool = True


def add_numbered_adapter_routes(app: FastAPI, context: ServerContext) -> None:
    numbered = context.adapters.numbered

    @app.get("/lora-adapters")
    async def lora_adapters() -> Response:
        found = [LoraFile(number, each.ref.name, each.scale) for number, each in numbered.usable().items()]
        return Response(_encoder.encode(found), media_type="application/json")


def add_scale_route(app: FastAPI, context: ServerContext) -> None:

    @app.post("/lora-adapters")
    @admin
    async def set_lora_adapters(request: Request) -> Response:
        body = b"".join(await read_body(request, context.max_body_bytes))
        try:
            given = msgspec.json.decode(body)
        except msgspec.MsgspecError as error:
            raise invalid_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(given, list):
            raise invalid_request("the request body must be a list of objects with id and scale", code="invalid_json")
        context.adapters.numbered.change(parse_fields({"lora": given}, LoraScales)[0].lora)
        return Response(_encoder.encode(ScalesSet()), media_type="application/json")
