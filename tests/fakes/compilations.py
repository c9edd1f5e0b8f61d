"""Which compiled kernels launches would need on a card: what Triton keeps them by, found out in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class CompilationRecorder:
    """A LaunchRecorder that runs nothing, and notes each kernel's name with the types, alignments and constants that it
    would be compiled for. Arguments that no compiled kernel takes (a number of NumPy's) are an error."""

    def __init__(self) -> None:
        self.needed: set[tuple[str, str]] = set()
        self._binders: dict[Any, Any] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        if kernel not in self._binders:
            # Interpreted kernels keep what they were made with; on a card they are compiled ones.
            compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[kernel] = create_function_from_signature(compiled.signature, compiled.params, BACKEND)
        _, specialization, options = self._binders[kernel](*args, **constants)
        self.needed.add((kernel.__name__, f"{specialization} {options}"))
