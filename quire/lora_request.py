"""vLLM's LoRARequest: the adapter of a call."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import UserError


class LoRARequest(msgspec.Struct, frozen=True):
    """Adapter; fields and their order are vLLM's. Invalid values raise UserError.

    lora_name: any name. lora_int_id: number above 0; later calls with it mean its first adapter, unless `load_inplace`.
    lora_path: directory in PEFT's layout, or a hub id. base_model_name: `parent` in /v1/models. load_inplace: read
    the directory again and replace the number's adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise UserError(f"lora_int_id must be an integer above 0, not {self.lora_int_id!r}", param="lora_int_id")
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise UserError(f"lora_name must be a text, not {self.lora_name!r}", param="lora_name")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise UserError("lora_path must name a directory or a hub id", param="lora_path")
        if self.tensorizer_config_dict is not None:
            raise UserError("tensorizer_config_dict is not supported", param="tensorizer_config_dict")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path
