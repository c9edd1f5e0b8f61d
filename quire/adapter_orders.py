"""Adapter orders in step plans (quire/step.py)."""

from __future__ import annotations

import msgspec

PATIENCE = 0.05
"""Seconds that a plan without tokens waits for a load."""


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """Reference to an adapter's directory and content, in requests and plans."""

    path: str
    """Directory in PEFT's layout."""
    digest: bytes
    """Digest of content and scale (quire/config/adapter_files.py). Adapters of equal digest compute the same."""
    name: str = ""
    """Name at the first use, for messages."""
    scale: float = 1.0
    """Factor of what the adapter adds."""


class AdapterOrders(msgspec.Struct, array_like=True):
    """Adapter loads of a step plan. The workers start them before anything else."""

    loads: list[tuple[int, AdapterRef]] = []
    """(slot, adapter): loads that run beside this step and later ones. No step has rows of a slot before a result
    reports it as loaded. The former adapter is dropped when the load ends."""
    awaits_report: bool = False
    """A load must end first: the plan has no tokens; its result comes with a load's end, or soon."""
