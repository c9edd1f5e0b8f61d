"""The device slice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceConfig:
    """device: "cpu" (others come with their back ends). num_threads: compute threads of the CPU back end.
    attention_backend: resolved name in the attention registry.
    """

    device: str
    num_threads: int
    attention_backend: str
