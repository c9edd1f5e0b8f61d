"""What all Triton kernels share: whether they run compiled or interpreted, and products that are right in both.

Compiled, a kernel runs on tensors of a GPU. With `TRITON_INTERPRET=1`, set before this is imported, Triton runs the
same source block by block in NumPy on host tensors, which is how its correctness is tested where there is no GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire import envs

INTERPRETED = tl.constexpr(envs.triton_interpret())


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a @ b, added in float32. a: [M, K], b: [K, N] of one dtype; float32 operands are multiplied as such
    (no tf32)."""
    if INTERPRETED:
        # The interpreter keeps bfloat16 as its bits and would multiply those.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
