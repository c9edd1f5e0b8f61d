"""LoRA adapters that a front end knows: by number offline (as in vLLM), by name in a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import open_adapter
from quire.config.adapters import AdaptersConfig
from quire.config.hub import fetch_adapter, looks_like_a_path
from quire.errors import ModelLoadError, UserError, nearest_name
from quire.lora_request import LoRARequest

LoRARequests = LoRARequest | AdapterRef | Sequence[LoRARequest | AdapterRef | None] | None


class KnownAdapters:
    """Thread-safe registry of LoRA adapters. One is read when first named, or again with `load_inplace`. A request
    carries the digest of what was read."""

    def __init__(self, config: AdaptersConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._by_number: dict[int, tuple[LoRARequest, AdapterRef]] = {}
        self._by_name: dict[str, LoRARequest] = {}
        self._last_number = 0

    def refuse(self) -> None:
        """Raise UserError if the engine takes no adapters."""
        if not self._config.is_on:
            raise UserError("lora_request needs an engine with enable_lora=True", param="lora_request")

    def resolve(self, lora_request: LoRARequest | AdapterRef | None) -> AdapterRef | None:
        """Reference for a request; None: no adapter. Raises UserError for an invalid or incompatible adapter."""
        if lora_request is None:
            return None
        self.refuse()
        if isinstance(lora_request, AdapterRef):
            return lora_request
        if not isinstance(lora_request, LoRARequest):
            raise UserError(
                f"lora_request must be a LoRARequest, not {type(lora_request).__name__}", param="lora_request"
            )
        with self._lock:
            known = self._by_number.get(lora_request.lora_int_id)
            if known is not None and not lora_request.load_inplace:
                if known[0].lora_path != lora_request.lora_path:
                    raise UserError(
                        f"lora_int_id {lora_request.lora_int_id} stands for {known[0].lora_path!r}: another adapter "
                        "has another number, or load_inplace=True",
                        param="lora_int_id",
                    )
                return known[1]
        found = open_adapter(_directory(lora_request.lora_path), self._config)
        ref = msgspec.structs.replace(found, name=lora_request.lora_name)
        with self._lock:
            self._by_number[lora_request.lora_int_id] = (lora_request, ref)
        return ref

    def each(self, lora_request: LoRARequests, count: int) -> list[AdapterRef | None]:
        """One adapter for each of `count` requests. Raises UserError as `resolve`."""
        if isinstance(lora_request, str) or not isinstance(lora_request, Sequence):
            return [self.resolve(lora_request)] * count
        if len(lora_request) != count:
            raise UserError(f"got {len(lora_request)} lora_requests for {count} prompts", param="lora_request")
        return [self.resolve(one) for one in lora_request]

    def forget(self, number: int) -> bool:
        with self._lock:
            return self._by_number.pop(number, None) is not None

    # -- by name ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def named(self, name: str) -> LoRARequest | None:
        return self._by_name.get(name)

    def add_name(self, name: str, path: str, base_model_name: str | None = None, *, load_inplace: bool = False) -> None:
        """Name an adapter. Raises UserError if the name is taken, unless `load_inplace`, and as `resolve`."""
        self.refuse()
        with self._lock:
            if name in self._by_name and not load_inplace:
                raise UserError(
                    f"the adapter {name!r} has already been loaded: load_inplace replaces it", param="lora_name"
                )
            request = self._request(name, path, base_model_name)
        self.resolve(msgspec.structs.replace(request, load_inplace=load_inplace))
        with self._lock:
            self._by_name[name] = request

    def known(self, name: str) -> tuple[LoRARequest, AdapterRef]:
        """Adapter of a known name. Raises KeyError."""
        with self._lock:
            request = self._by_name[name]
            return request, self._by_number[request.lora_int_id][1]

    def learn(self, name: str, path: str, ref: AdapterRef, base_model_name: str | None) -> None:
        """Register an adapter that another process has read. By API processes."""
        with self._lock:
            request = self._request(name, path, base_model_name)
            self._by_name[name], self._by_number[request.lora_int_id] = request, (request, ref)

    def _request(self, name: str, path: str, base_model_name: str | None) -> LoRARequest:
        known = self._by_name.get(name)
        if known is None:
            number = self._last_number = max(self._last_number, max(self._by_number, default=0)) + 1
        else:
            number = known.lora_int_id
        return LoRARequest(name, number, path, base_model_name)

    def remove(self, name: str) -> None:
        """Remove an adapter by name. Raises UserError if it is unknown."""
        with self._lock:
            known = self._by_name.pop(name, None)
            if known is None:
                nearest = nearest_name(name, self._by_name)
                raise UserError(f"the adapter {name!r} cannot be found{nearest}", param="lora_name")
            self._by_number.pop(known.lora_int_id, None)


def _directory(path: str) -> str:
    """Local directory of an adapter; a hub id is downloaded first."""
    if Path(path).expanduser().exists() or looks_like_a_path(path):
        return path
    try:
        return str(fetch_adapter(path))
    except ModelLoadError as error:
        raise UserError(error.message.replace("model ", "adapter ", 1), param="lora_path") from None
