"""Exact widening of weight codes, four at a time; Triton widens bytes one by one. The interpreter and float32 use
`weight_formats`."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.float8 import widen_e4m3
from quire.kernels.triton.runtime import INTERPRETED

_SPREAD = """
    prmt.b32 low, $IN, 0, LOW;
    prmt.b32 high, $IN, 0, HIGH;
"""


def _text(body: str, num_results: int, *, low: str, high: str) -> str:
    """Inline PTX that spreads four codes and runs `body`. low, high: how the input's bytes 0 and 1, or 2 and 3, enter
    halves of a word."""
    spread = _SPREAD.replace("$IN", f"${num_results}").replace("LOW", low).replace("HIGH", high)
    return f"{{ .reg .b32 low, high, t, u, one, two; {spread}{body} }}"


def _nibbles(magic: int, one: int, minus: int, kind: str) -> str:
    """PTX for integers 0 to 15: last bits of a large number, minus that number."""
    lines = [f"mov.b32 one, {one:#010x}; mov.b32 two, {minus:#010x};"]
    for index, (word, shift) in enumerate([("low", 0), ("high", 0), ("low", 4), ("high", 4)]):
        lines.append(f"shr.u32 t, {word}, {shift};" if shift else f"mov.b32 t, {word};")
        lines.append(f"lop3.b32 t, t, 0x000f000f, {magic:#010x}, 0xea;")
        lines.append(f"fma.rn.{kind}x2 ${index}, t, one, two;")
    return _text(" ".join(lines), 4, low="0x4140", high="0x4342")


def _bytes_lie_above(shift: int, mask: int, factor: int, kind: str, lefts: tuple[int, ...]) -> str:
    """PTX for floats whose sign is the top bit of a byte or nibble: other bits move to the wide exponent's place; a
    factor corrects the bias."""
    lines = [f"mov.b32 one, {factor:#010x}; mov.b32 two, 0x80008000;"]
    for index in range(2 * len(lefts)):
        word, left = ("low", "high")[index % 2], lefts[index // 2]
        lines.append(f"shl.b32 u, {word}, {left};" if left else f"mov.b32 u, {word};")
        lines.append(f"shr.u32 t, u, {shift}; and.b32 t, t, {mask:#010x};")
        lines.append("lop3.b32 t, u, 0x80008000, t, 0xea;")
        lines.append(f"fma.rn.{kind}x2 ${index}, t, one, two;")
    return _text(" ".join(lines), 2 * len(lefts), low="0x1404", high="0x3424")


I4_BF16 = tl.constexpr(_nibbles(0x43004300, 0x3F803F80, 0xC300C300, "bf16"))
I4_FP16 = tl.constexpr(_nibbles(0x64006400, 0x3C003C00, 0xE400E400, "f16"))
E2M1_BF16 = tl.constexpr(_bytes_lie_above(6, 0x01C001C0, 0x7E807E80, "bf16", (4, 0)))
E2M1_FP16 = tl.constexpr(_bytes_lie_above(3, 0x0E000E00, 0x74007400, "f16", (4, 0)))
E4M3_BF16 = tl.constexpr(_bytes_lie_above(4, 0x07F007F0, 0x7B807B80, "bf16", (0,)))
E4M3_FP16 = tl.constexpr(_bytes_lie_above(1, 0x3F803F80, 0x5C005C00, "f16", (0,)))
I4_I8 = tl.constexpr("{ .reg .b32 t; and.b32 $0, $2, 0x0f0f0f0f; shr.u32 t, $2, 4; and.b32 $1, t, 0x0f0f0f0f; }")


@triton.jit
def widen_e2m1(codes, DTYPE: tl.constexpr):
    """Convert e2m1 codes (uint8, 0 to 15) to DTYPE, as `widen_e4m3` with a factor of 2 ** 14."""
    bits = codes.to(tl.uint16)
    return ((((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0).to(DTYPE)


@triton.jit
def _both_as_bf16(TEXT: tl.constexpr, pairs):
    types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
    return tl.inline_asm_elementwise(TEXT, "=r,=r,=r,=r,r", [pairs], types, is_pure=True, pack=4)


@triton.jit
def _both_as_fp16(TEXT: tl.constexpr, pairs):
    types: tl.constexpr = (tl.float16, tl.float16)
    return tl.inline_asm_elementwise(TEXT, "=r,=r,=r,=r,r", [pairs], types, is_pure=True, pack=4)


@triton.jit
def halves_as_integers(pairs, DTYPE: tl.constexpr):
    """Low and high nibbles of bytes as integers in DTYPE: a 16-bit type, float32 or int8."""
    if INTERPRETED or tl.float32 == DTYPE:
        low, high = (pairs & 0xF).to(tl.int8), (pairs >> 4).to(tl.int8)
        if tl.int8 != DTYPE:
            low, high = low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)
    elif tl.int8 == DTYPE:
        low, high = tl.inline_asm_elementwise(I4_I8, "=r,=r,r", [pairs], (tl.int8, tl.int8), is_pure=True, pack=4)
    elif tl.bfloat16 == DTYPE:
        low, high = _both_as_bf16(I4_BF16, pairs)
    else:
        low, high = _both_as_fp16(I4_FP16, pairs)
    return low, high


@triton.jit
def halves_as_e2m1(pairs, DTYPE: tl.constexpr):
    """Low and high nibbles of bytes as 4-bit floats."""
    if INTERPRETED or tl.float32 == DTYPE:
        low, high = widen_e2m1(pairs & 0xF, DTYPE), widen_e2m1(pairs >> 4, DTYPE)
    elif tl.bfloat16 == DTYPE:
        low, high = _both_as_bf16(E2M1_BF16, pairs)
    else:
        low, high = _both_as_fp16(E2M1_FP16, pairs)
    return low, high


@triton.jit
def words_of_e4m3(codes, DTYPE: tl.constexpr):
    """e4m3 numbers or their bits (no NaN) in DTYPE."""
    if INTERPRETED or tl.float32 == DTYPE:
        wide = widen_e4m3(codes, DTYPE)
    else:
        bits = codes.to(tl.uint8, bitcast=True)
        if tl.bfloat16 == DTYPE:
            wide = tl.inline_asm_elementwise(E4M3_BF16, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4)
        else:
            wide = tl.inline_asm_elementwise(E4M3_FP16, "=r,=r,r", [bits], tl.float16, is_pure=True, pack=4)
    return wide


@triton.jit
def ones_beside(codes, DTYPE: tl.constexpr):
    """Ones in the shape and layout of `codes` (bytes), for products with one operand."""
    if INTERPRETED or tl.float32 == DTYPE:
        ones = tl.full(codes.shape, 1, tl.float32).to(DTYPE)
    elif tl.int8 == DTYPE:
        ones = tl.inline_asm_elementwise("mov.b32 $0, 0x01010101;", "=r,r", [codes], tl.int8, is_pure=True, pack=4)
    elif tl.bfloat16 == DTYPE:
        text: tl.constexpr = "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;"
        ones = tl.inline_asm_elementwise(text, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        text_16: tl.constexpr = "mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00;"
        ones = tl.inline_asm_elementwise(text_16, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)
    return ones
