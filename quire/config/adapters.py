from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.model_shape import ModelShape

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank`, as in vLLM."""
ADAPTER_SLOTS = "adapter_slots"
"""Step column of the slot whose adapter a token has; 0: none."""
DTYPES = ("auto", "float32", "float16", "bfloat16")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EXPERTS = "experts"
"""Part of the names of experts' modules."""
EXPERT_MODULES = {EXPERTS, "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class AdaptersConfig:
    """LoRA settings of an engine. max_running: adapters whose requests run at a time; 0: adapters are off. max_rank:
    largest rank. num_slots: adapters that workers hold, at least max_running. target_modules: last parts of module
    names that adapters may change (None: any)."""

    max_running: int = 0
    max_rank: int = 16
    num_slots: int = 0
    dtype: str = "float32"
    target_modules: tuple[str, ...] | None = None

    @property
    def is_on(self) -> bool:
        return self.max_running > 0

    def allows(self, module: str) -> bool:
        parts = module.split(".")
        own = {parts[-1], EXPERTS} if EXPERTS in parts else {parts[-1]}
        return self.target_modules is None or not own.isdisjoint(self.target_modules)

    @property
    def allows_experts(self) -> bool:
        return self.target_modules is None or not EXPERT_MODULES.isdisjoint(self.target_modules)

    def elements_of(self, shape: ModelShape, expert_share: float = 1.0) -> int:
        """Upper bound of an adapter's elements on a rank with this share of experts."""
        of_experts = math.ceil(shape.expert_adapter_elements * expert_share) if self.allows_experts else 0
        return shape.adapter_elements + shape.table_adapter_elements + of_experts

    def slot_bytes(self, elements: int) -> int:
        """Bytes reserved for all slots, at the largest rank. elements: an adapter's elements for each rank."""
        return elements * self.max_rank * self.num_slots * _BYTES[self.dtype] if self.is_on else 0

    def saved_bytes(self, elements: int) -> int:
        """Bytes reserved for whole matrices."""
        return 4 * elements * self.num_slots if self.is_on else 0


NO_ADAPTERS = AdaptersConfig()


def adapters_config(
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int | None,
    lora_dtype: str,
    lora_target_modules: Sequence[str] | None,
    model_dtype: str,
) -> AdaptersConfig:
    if max_loras < 1:
        raise ConfigError(f"max_loras must be at least 1, not {max_loras}", param="max_loras")
    if max_lora_rank not in RANKS:
        known = ", ".join(map(str, RANKS))
        raise ConfigError(f"max_lora_rank must be one of {known}, not {max_lora_rank}", param="max_lora_rank")
    if max_cpu_loras is not None and max_cpu_loras < max_loras:
        raise ConfigError(
            f"max_cpu_loras ({max_cpu_loras}) must be at least max_loras ({max_loras})", param="max_cpu_loras"
        )
    if lora_dtype not in DTYPES:
        raise ConfigError(f"lora_dtype must be one of {', '.join(DTYPES)}, not {lora_dtype!r}", param="lora_dtype")
    return AdaptersConfig(
        max_loras,
        max_lora_rank,
        max_cpu_loras or max_loras,
        model_dtype if lora_dtype == "auto" else lora_dtype,
        None if lora_target_modules is None else tuple(lora_target_modules),
    )
