"""Adapters as requests and plans name them (quire/step.py)."""

from __future__ import annotations

import msgspec


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """An adapter: where it lies, and what it holds."""

    path: str
    """A directory in PEFT's layout."""
    digest: bytes
    """Of its content (quire/config/peft.py): two of one digest compute the same, wherever they lie."""
    name: str = ""
    """For people: what it was called first."""


class AdapterOrders(msgspec.Struct, array_like=True):
    """What a plan has the workers do with adapters, before anything else."""

    loads: list[tuple[int, AdapterRef]] = []
    """(slot, adapter): load it into the slot, beside this step and later ones, none of which has rows of the slot until
    a result says that it is loaded. What the slot held before is dropped when the load ends."""
    awaits_report: bool = False
    """Nothing can be computed before a load ends: a plan without tokens, whose result comes when one has, or after a
    short while."""
