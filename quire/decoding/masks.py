"""Masks: which tokens a constrained request may have next.

The engine core asks a `MaskSource` when all tokens before the one to be sampled are known, and sends the masks to the
workers, whose forward pass may run already (`SamplingInputs` in quire/step.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import UserError


class MaskSource(Protocol):
    """Knows the constraints that requests name (`EngineRequest.constraint`)."""

    def check(self, constraint: str) -> None:
        """Raise UserError when a request may not name this constraint."""
        ...

    def mask(self, constraint: str, token_ids: Sequence[int]) -> bytes:
        """The tokens that may follow `token_ids`, which were generated so far: packed bits, [ceil(vocab size / 32)]
        little-endian uint32, token t at bit t % 32 of word t // 32. At least one token is allowed."""
        ...


class NoMasks:
    """An engine without constraints."""

    def check(self, constraint: str) -> None:
        raise UserError("this engine has no constraints on tokens", param="constraint")

    def mask(self, constraint: str, token_ids: Sequence[int]) -> bytes:
        raise AssertionError(f"no request has the constraint {constraint!r}")


NO_MASKS = NoMasks()
