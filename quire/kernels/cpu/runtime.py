"""The native kernels that a worker computes with: an instruction set and a pool of threads."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError
from quire.kernels.cpu import _native


class NativeRuntime:
    """isa: name of an instruction set that this machine has, or "auto" for the best. num_threads: of the pool, the
    calling thread included. Raises ConfigError for an instruction set that is not available."""

    def __init__(self, isa: str, num_threads: int) -> None:
        try:
            self.isa: str = _native.resolve_isa(isa)
        except ValueError as error:
            raise ConfigError(f"QUIRE_CPU_ISA: {error}") from None
        self.pool = _native.Pool(num_threads, pin=True)

    @property
    def binary(self) -> Path:
        """The extension module."""
        return Path(_native.__file__)

    def __repr__(self) -> str:
        return f"native kernels for {self.isa}, {self.pool.threads} threads"
