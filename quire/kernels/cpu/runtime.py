"""Worker's native runtime: instruction set and thread pool."""

from __future__ import annotations

import itertools
from pathlib import Path

from quire.errors import ConfigError
from quire.kernels.cpu import _native
from quire.kernels.cpu.precision import choose_precision

_PRECISIONS = {"float32": _native.MatmulPrecision.FLOAT32, "bfloat16": _native.MatmulPrecision.BFLOAT16}


class NativeRuntime:
    """Native CPU kernels of a process, with their threads. isa: instruction set, or "auto" for the best. num_threads:
    threads of the pool, the caller included. matmul_precision: "float32"; "bfloat16", which rounds activations before
    products (see `rounds_for_quantised`); "auto", the faster. The attribute is the choice, precision_reason why. Raises
    ConfigError for an unavailable instruction set or precision."""

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
        """New ForwardBatch.version, for newly made step inputs."""
        return next(self._versions)

    @property
    def native_precision(self) -> _native.MatmulPrecision:
        return _PRECISIONS[self.matmul_precision]

    @property
    def rounds_for_quantised(self) -> bool:
        """True if "bfloat16" also applies to quantised weights: activations are rounded to bfloat16 for AMX tiles, and
        to two 8-bit digits for vector products."""
        return self.isa in ("amx", "amx_emulated", "avx512_bf16")

    @property
    def binary(self) -> Path:
        return Path(_native.__file__)

    def __repr__(self) -> str:
        return f"native kernels for {self.isa}, {self.pool.threads} threads"
