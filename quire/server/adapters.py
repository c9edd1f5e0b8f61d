"""LoRA adapters by name, and the routes that load and unload them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from fastapi import FastAPI, Request, Response

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import NO_SUMS
from quire.errors import ConfigError, UserError
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.server.auth import admin
from quire.server.errors import invalid_request, unavailable
from quire.server.numbered_adapters import NumberedAdapters, add_scale_route
from quire.server.protocol.common import LoraScale, RequestStruct
from quire.server.reading import read_request
from quire.server.settings import LLAMA_CPP, ServerSettings
from quire.server.shared_adapters import NamedAdapter, Names, SharedAdapters

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.server.context import ServerContext

OPTION = "lora_modules"
PROBE = "lora-probe"
"""Cache salt of the requests that try an adapter when it is loaded."""


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> LoraModule:
        """Parse NAME=PATH or a JSON object. Raises ConfigError."""
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
    """Body of /v1/load_lora_adapter. load_inplace: replace the adapter of this name; running requests keep theirs."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")


class UnloadAdapter(RequestStruct, kw_only=True, frozen=True):
    """Body of /v1/unload_lora_adapter. lora_int_id: unused; vLLM's clients may send it."""

    lora_name: str = ""
    lora_int_id: int | None = None

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise UserError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")


class ServedAdapters:
    """Adapters of one server, by the names that requests give in `model`."""

    def __init__(
        self,
        engine: AsyncLLM,
        directory: str | None,
        base_names: Sequence[str],
        shared: SharedAdapters | None = None,
    ) -> None:
        """directory: folder of adapters loaded when a request first names them. shared: adapters of all API
        processes, if several. Raises ConfigError."""
        self._engine = engine
        self._directory = None if directory is None else Path(directory).expanduser().resolve()
        self._base_names = base_names
        shared = shared or SharedAdapters()
        self._shared = shared.names
        self.numbered = NumberedAdapters(shared.numbered)
        self._changing = asyncio.Lock()
        self._loading = ""
        self._told: set[str] = set()
        """Names in the shared table, as far as this process knows."""
        if self._directory is not None:
            if not engine.engine_config.adapters.is_on:
                raise ConfigError("lora_dir needs enable_lora", param="lora_dir")
            if not self._directory.is_dir():
                raise ConfigError(f"lora_dir: {directory} is no directory", param="lora_dir")

    @property
    def names(self) -> list[str]:
        self._hear()
        return self._engine.adapters.names

    def find(self, name: str) -> LoRARequest | None:
        self._hear()
        return self._engine.adapters.named(name)

    def chosen(self, name: str, lora: Sequence[LoraScale] | None = None) -> LoRARequest | AdapterRef | None:
        """Adapter that a request chooses by model name or by `lora`; None: none. Raises UserError for both, and as
        NumberedAdapters.chosen does."""
        named = self.find(name)
        if named is not None and not lora:
            return named
        numbered = self.numbered.chosen(lora)
        if named is not None and numbered is not None:
            raise UserError(f"lora: {NO_SUMS}, and the model {name!r} is one already", param="lora")
        return named or numbered

    async def meet(self, name: str) -> None:
        """Register the adapter `name` of the directory (`lora_dir`), if it is there and not known yet. Raises UserError
        if it cannot be read."""
        if self._directory is None or name in self._base_names or self.find(name) is not None:
            return
        path = self._directory / name
        if "/" in name or name in ("", ".", "..") or not (path / "adapter_config.json").is_file():
            return
        if path.resolve().parent != self._directory:
            return
        async with self._changing:
            if self.find(name) is None:
                with self._loads(name):
                    await asyncio.to_thread(self._engine.adapters.add_name, name, str(path))
                    self._publish(name, "keep")

    async def load(self, module: LoraModule, *, load_inplace: bool = False, is_new: bool = True) -> None:
        """Read an adapter and compute one token with it, to refuse one that does not fit the model. is_new: refuse a
        taken name. Raises UserError, and ApiError (503) in a pause."""
        if module.name in self._base_names:
            raise UserError(f"the name {module.name!r} is the model's own", param="lora_name")
        adapters = self._engine.adapters
        async with self._changing:
            before = None if self.find(module.name) is None else adapters.known(module.name)
            if before is not None and not is_new:
                return
            with self._loads(module.name):
                await asyncio.to_thread(
                    adapters.add_name, module.name, module.path, module.base_model_name, load_inplace=load_inplace
                )
                try:
                    if self._engine.pauses:  # the token would wait for its end, and all that loads for the token
                        raise unavailable("the engine is paused, and loads adapters again after POST /resume")
                    await self._try(adapters.named(module.name))
                    self._publish(module.name, "replace" if load_inplace else "refuse" if is_new else "keep")
                except BaseException:
                    if before is None:
                        adapters.remove(module.name)
                    else:  # as it was read: its files may be others now
                        request, ref = before
                        adapters.learn(module.name, request.lora_path, ref, request.base_model_name)
                    raise

    @contextlib.contextmanager
    def _loads(self, name: str) -> Iterator[None]:
        # What the others say of this name meanwhile counts behind it.
        self._loading = name
        try:
            yield
        finally:
            self._loading = ""
            self._shared.reread()

    async def unload(self, name: str) -> None:
        """Forget the adapter of this name. Raises ApiError (404) if it is unknown."""
        async with self._changing:
            if self.find(name) is None:
                raise invalid_request(
                    f"The lora adapter '{name}' cannot be found.", param="lora_name", code="not_found", status=404
                )
            self._engine.adapters.remove(name)
            self._told.discard(name)
            self._shared.change(partial(_forget, name))

    def _publish(self, name: str, known: Literal["replace", "refuse", "keep"]) -> None:
        """Tell the other API processes of an adapter. known: action if another process has named it meanwhile; "refuse"
        raises UserError."""
        request, ref = self._engine.adapters.known(name)

        def put(names: Names) -> None:
            if name in names and known == "refuse":
                raise UserError(
                    f"the adapter {name!r} has already been loaded: load_inplace replaces it", param="lora_name"
                )
            if name not in names or known == "replace":
                names[name] = NamedAdapter(request.lora_path, ref, request.base_model_name)

        self._shared.change(put)
        self._told.add(name)

    def _hear(self) -> None:
        news = self._shared.news()
        if news is None:
            return
        adapters = self._engine.adapters
        gone, self._told = self._told - news.keys(), set(news)
        for name in gone & set(adapters.names) - {self._loading}:
            adapters.remove(name)
        for name, told in news.items():
            if name != self._loading:
                adapters.learn(name, told.path, told.ref, told.base_model_name)

    async def load_at_start(self, settings: ServerSettings) -> None:
        """Load the settings' adapters, before the server is ready. Raises ConfigError."""
        for text in settings.lora_modules:
            try:
                await self.load(LoraModule.parse(text), is_new=False)
            except UserError as error:
                raise ConfigError(f"{OPTION}: {text}: {error.message}", param=OPTION) from None
        try:
            if settings.lora_files:
                self._engine.adapters.refuse()
            limits = self._engine.engine_config.adapters
            for ref in await asyncio.to_thread(self.numbered.open, settings.lora_files, limits):
                await self._try(ref)
        except UserError as error:
            raise ConfigError(f"lora: {error.message}", param="lora") from None

    async def _try(self, adapter: LoRARequest | AdapterRef | None) -> None:
        if self._engine.model_config.pooling is not None:
            await self._engine.pool([0], PoolingParams(), cache_salt=PROBE, lora_request=adapter)
            return
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, seed=0)
        async for _ in self._engine.generate([0], params, cache_salt=PROBE, lora_request=adapter):
            pass


def _forget(name: str, names: Names) -> None:
    names.pop(name, None)


def add_adapter_routes(app: FastAPI, context: ServerContext) -> None:
    if LLAMA_CPP in context.settings.doors:
        add_scale_route(app, context)

    @app.post("/v1/load_lora_adapter")
    @admin
    async def load_lora_adapter(request: Request) -> Response:
        body = await read_request(request, context, LoadAdapter)
        context.check_alive()
        module = LoraModule(body.lora_name, body.lora_path, body.base_model_name)
        try:
            await context.adapters.load(module, load_inplace=body.load_inplace)
        except UserError as error:
            own = error.named({"lora_request": "lora_path"})
            if own.param == "lora_path" and not os.path.exists(os.path.expanduser(body.lora_path)):
                raise invalid_request(own.message, param=own.param, code="not_found", status=404) from None
            raise own from None
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @app.post("/v1/unload_lora_adapter")
    @admin
    async def unload_lora_adapter(request: Request) -> Response:
        body = await read_request(request, context, UnloadAdapter)
        await context.adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")
