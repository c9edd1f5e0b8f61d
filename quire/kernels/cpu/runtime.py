"""The native kernels that a worker computes with: an instruction set and a pool of threads."""

from __future__ import annotations

import itertools
from pathlib import Path

from quire.errors import ConfigError
from quire.kernels.cpu import _native
from quire.kernels.cpu.precision import choose_precision

_PRECISIONS = {"float32": _native.MatmulPrecision.FLOAT32, "bfloat16": _native.MatmulPrecision.BFLOAT16}


class NativeRuntime:
    """isa: name of an instruction set that this machine has, or "auto" for the best. num_threads: threads of the pool,
    the calling thread included. matmul_precision: "float32"; "bfloat16" rounds activations before they multiply
    weights, keys or values that are stored in it (and others: `rounds_for_quantised`); "auto" does so where that is
    faster (quire/kernels/cpu/precision.py). The attribute says which of the two it is, precision_reason why (empty
    where there was no choice). Raises ConfigError for an instruction set that is not available, and for a precision
    that it does not have."""

    def __init__(self, isa: str, num_threads: int, matmul_precision: str = "float32") -> None:
        try:
            self.isa: str = _native.resolve_isa(isa)
        except ValueError as error:
            raise ConfigError(f"QUIRE_CPU_ISA: {error}") from None
        possible = _native.has_bf16_products(self.isa)
        if matmul_precision == "bfloat16" and not possible:
            raise ConfigError(
                f"matmul_precision='bfloat16' needs a CPU with AVX512-BF16 or AMX: {self.isa} cannot multiply bfloat16",
                param="matmul_precision",
            )
        self.precision_reason = ""
        if matmul_precision == "auto":
            choice = choose_precision(self.isa)
            matmul_precision = choice.precision
            if possible:
                self.precision_reason = choice.reason
        self.matmul_precision = matmul_precision
        self.pool = _native.Pool(num_threads, pin=True)
        self._versions = itertools.count(1)

    def next_version(self) -> int:
        """A version that no memory of a step's inputs has had (ForwardBatch)."""
        return next(self._versions)

    @property
    def native_precision(self) -> _native.MatmulPrecision:
        """`matmul_precision` as programs take it."""
        return _PRECISIONS[self.matmul_precision]

    @property
    def rounds_for_quantised(self) -> bool:
        """True where "bfloat16" concerns quantised weights, too: activations are rounded to bfloat16 for the tiles of
        AMX, and to two digits of eight bits for products on vectors."""
        return self.isa in ("amx", "amx_emulated", "avx512_bf16")

    @property
    def binary(self) -> Path:
        """The extension module."""
        return Path(_native.__file__)

    def __repr__(self) -> str:
        return f"native kernels for {self.isa}, {self.pool.threads} threads"
