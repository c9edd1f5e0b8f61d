"""What travels between the two halves of a KV connector: orders in a StepPlan, reports in a StepResult.

Every connector has types of its own. Its orders derive from HostTransfers, because each engine with a host pool swaps
preempted sequences, whichever connector it has; its reports are free. Both are listed in the unions below, by which the
decoder of another process tells them apart (each has a `tag`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

BlockKey: TypeAlias = tuple[int, bytes]
"""(KV group, block hash)."""


class HostTransfers(msgspec.Struct, tag="host", array_like=True):
    """Copies between the pools of device and host: of preempted sequences, and of cached blocks."""

    swap_out: list[tuple[int, int]] = []
    """(device block, host block): whole blocks, every page tensor. Destinations are distinct, also in `swap_in`."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block)"""
    awaits_report: bool = False
    """Nothing can be computed before transfers end: a plan without tokens, whose result comes when the connector's
    worker half has a report, or after a short while."""


class OffloadTransfers(HostTransfers, tag="offload"):
    """The orders of OffloadConnector (quire/kv_cache/connectors/offload.py). Stores and loads touch host memory only:
    loads begin with the plan, stores behind its copies."""

    stores: list[tuple[int, int, bytes]] = []
    """(host block, KV group, block hash): keep a copy on disk, behind this plan's swap_out. The host block keeps its
    content until the result of this or a later plan names it as released."""
    loads: list[tuple[int, bytes, int]] = []
    """(KV group, block hash, host block): bring a block from disk. Until a result names the host block as loaded (or
    failed) no plan refers to it."""


class OffloadReport(msgspec.Struct, tag="offload", array_like=True):
    """The transfers of OffloadConnector since the result before; each end is reported once, in any order."""

    found: list[BlockKey] = []
    """Blocks that are on disk: stored now, or found there at the start."""
    gone: list[BlockKey] = []
    """Removed from disk to make room."""
    loaded: list[int] = []
    """Host blocks that now hold the content asked for, checked."""
    failed: list[int] = []
    """Host blocks whose load failed (the file is gone, or is not what it should be); their content is void."""
    released: list[int] = []
    """Host blocks whose store has ended, one way or the other."""
    num_stored: int = 0
    """Files written."""
    num_store_failures: int = 0
    num_bytes: int = 0
    """In the directory, other models' and engines' files included, as far as known."""
    load_seconds: float = 0.0
    """What a block took to load lately, all loading threads at work; 0: not known."""
    token_seconds: float = 0.0
    """What a token of a long prompt took to compute lately; 0: not known."""
    is_scanning: bool = False
    """More of what the directory held at the start is to come."""


Transfers: TypeAlias = HostTransfers | OffloadTransfers
"""Whatever a plan can order; a new connector adds its type."""
TransferReport: TypeAlias = OffloadReport
"""Whatever a result can report; a new connector adds its type."""
