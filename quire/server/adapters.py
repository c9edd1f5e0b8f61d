"""Adapters by name: those of the start, of a directory, and the routes that load and unload them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request, Response

from quire.errors import ConfigError, QuireError, UserError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.server.auth import admin
from quire.server.errors import invalid_request
from quire.server.protocol.common import RequestStruct
from quire.server.reading import read_request

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.server.context import ServerContext

OPTION = "lora_modules"
PROBE = "lora-probe"
"""What the requests are called that try an adapter when it is loaded."""


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of --lora-modules, as vLLM writes it in JSON."""

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> LoraModule:
        """NAME=PATH, or a JSON object. Raises ConfigError."""
        try:
            if text.lstrip().startswith("{"):
                found = msgspec.json.decode(text, type=cls)
            else:
                name, _, path = text.partition("=")
                found = cls(name, path)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{OPTION}: {text!r}: {error}", param=OPTION) from None
        if not found.name or not found.path:
            raise ConfigError(f"{OPTION}: {text!r} is not NAME=PATH, nor a JSON object with both", param=OPTION)
        return found


class LoadAdapter(RequestStruct, kw_only=True, frozen=True):
    """The body of /v1/load_lora_adapter. load_inplace: replace the adapter of this name; running requests keep it."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")


class UnloadAdapter(RequestStruct, kw_only=True, frozen=True):
    """The body of /v1/unload_lora_adapter. lora_int_id: is not asked for, as names are."""

    lora_name: str = ""
    lora_int_id: int | None = None

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise UserError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")


class ServedAdapters:
    """The adapters of one server, by the names that requests have in `model`."""

    def __init__(self, engine: AsyncLLM, directory: str | None, base_names: Sequence[str]) -> None:
        """directory: of adapters that are loaded when a request names them; None: there is none. Raises ConfigError."""
        self._engine = engine
        self._directory = None if directory is None else Path(directory).expanduser().resolve()
        self._base_names = base_names
        self._changing = asyncio.Lock()
        if self._directory is not None:
            if not engine.engine_config.adapters.is_on:
                raise ConfigError("lora_dir needs enable_lora", param="lora_dir")
            if not self._directory.is_dir():
                raise ConfigError(f"lora_dir: {directory} is no directory", param="lora_dir")

    @property
    def names(self) -> list[str]:
        return self._engine.adapters.names

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of a name; None for other names. One of the directory is read now. Raises UserError for one that
        is there and cannot be read."""
        known = self._engine.adapters.named(name)
        if known is not None or self._directory is None:
            return known
        path = self._directory / name
        if "/" in name or name in ("", ".", "..") or not (path / "adapter_config.json").is_file():
            return None
        if path.resolve().parent != self._directory:
            return None
        self._engine.adapters.add(name, str(path))
        return self._engine.adapters.named(name)

    async def load(self, module: LoraModule, *, load_inplace: bool = False) -> None:
        """Read an adapter, and have the engine load it to compute one token: one that does not fit the model is refused
        now. Raises UserError."""
        if module.name in self._base_names:
            raise UserError(f"the name {module.name!r} is the model's own", param="lora_name")
        adapters = self._engine.adapters
        async with self._changing:
            before = adapters.named(module.name)
            await asyncio.to_thread(
                adapters.add, module.name, module.path, module.base_model_name, load_inplace=load_inplace
            )
            try:
                await self._try(adapters.named(module.name))
            except QuireError:
                adapters.remove(module.name)
                if before is not None:
                    await asyncio.to_thread(adapters.add, before.name, before.path, before.base_model_name)
                raise

    async def unload(self, name: str) -> None:
        """Raises ApiError for an adapter that there is not."""
        async with self._changing:
            if self._engine.adapters.named(name) is None:
                raise invalid_request(
                    f"The lora adapter '{name}' cannot be found.", param="lora_name", code="not_found", status=404
                )
            self._engine.adapters.remove(name)

    async def load_modules(self, modules: Sequence[str]) -> None:
        """Those of the start. Raises ConfigError."""
        for text in modules:
            try:
                await self.load(LoraModule.parse(text))
            except UserError as error:
                raise ConfigError(f"{OPTION}: {text}: {error.message}", param=OPTION) from None

    async def _try(self, adapter: LoRARequest | None) -> None:
        if self._engine.model_config.pooling is not None:
            return  # vectors are computed by their own parameters
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, seed=0)
        async for _ in self._engine.generate([0], params, cache_salt=PROBE, lora_request=adapter):
            pass


def add_adapter_routes(app: FastAPI, context: ServerContext) -> None:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter, which answer as vLLM's do."""

    def check_alone() -> None:
        """Raise ApiError where other API processes would not hear of it."""
        if context.settings.api_server_count > 1:
            raise invalid_request(
                "with --api-server-count above 1 adapters are those of --lora-modules and --lora-dir: one process "
                "alone would know of this one",
                param="lora_name",
            )

    @app.post("/v1/load_lora_adapter")
    @admin
    async def load_lora_adapter(request: Request) -> Response:
        body = await read_request(request, context, LoadAdapter)
        check_alone()
        context.check_alive()
        module = LoraModule(body.lora_name, body.lora_path, body.base_model_name)
        await context.adapters.load(module, load_inplace=body.load_inplace)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @app.post("/v1/unload_lora_adapter")
    @admin
    async def unload_lora_adapter(request: Request) -> Response:
        body = await read_request(request, context, UnloadAdapter)
        check_alone()
        await context.adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")
