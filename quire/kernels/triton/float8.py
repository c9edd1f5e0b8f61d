"""8-bit floats (e4m3) in kernels: Triton's type if the hardware converts them (capability 8.9), else bits; always bits
in the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_LARGEST = tl.constexpr(448.0)


def as_bits(pages: torch.Tensor) -> torch.Tensor:
    """View of the pages as `to_cache` writes them."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def as_pairs(pages: torch.Tensor) -> torch.Tensor:
    """View of the pages for attention: two e4m3 numbers of a head as one integer, signed for bits that no hardware
    converts. Wider dtypes are unchanged."""
    if pages.dtype.itemsize > 1:
        return pages
    return pages.view(torch.int16 if pages.dtype == torch.uint8 else torch.uint16)


def multiplied_bytes(dtype: torch.dtype, page_dtype: torch.dtype) -> int:
    """Bytes of an element that attention multiplies, as `operand` makes it."""
    return dtype.itemsize if page_dtype.itemsize == 1 or page_dtype == dtype else 4


@triton.jit
def widen_e4m3(codes, DTYPE: tl.constexpr):
    """Convert e4m3 numbers, or their bits, to DTYPE (no NaN). Shifted to float16's exponent, bits are number / 256,
    subnormals too."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        values = values.to(DTYPE)
    else:
        values = codes.to(DTYPE)
    return values


@triton.jit
def e4m3_bits(x):
    """float32 -> uint8: nearest e4m3 number, ties to even, saturating; non-finite -> NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), E4M3_LARGEST)
    low = magnitude.to(tl.uint32, bitcast=True)
    normal = ((low + 0x7FFFF + ((low >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    # Beside 2 ** 14 float32 has steps of 2 ** -9, which subnormal numbers are multiples of.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where((bits & 0x7F800000) == 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def to_cache(x, ELEMENT: tl.constexpr):
    """x as a page element: e4m3 bits for bytes, rounded as in the torch back end."""
    if tl.uint8 == ELEMENT:
        stored = e4m3_bits(x.to(tl.float32))
    else:
        stored = x.to(ELEMENT)
    return stored


@triton.jit
def from_cache(x, DTYPE: tl.constexpr):
    """Page elements in DTYPE, which holds every e4m3 number; float32 for two different wide dtypes."""
    if x.dtype == tl.uint8:
        x = tl.where((x & 0x7F) == 0x7F, float("nan"), widen_e4m3(x, tl.float32))
    return x.to(DTYPE)


@triton.jit
def widen_pairs(pairs, DTYPE: tl.constexpr):
    """Both numbers of each pair (`as_pairs`), in order, in DTYPE (float16 or float32); three instructions convert four
    numbers."""
    if pairs.dtype == tl.int16:
        first = from_cache((pairs & 0xFF).to(tl.uint8), DTYPE)
        second = from_cache(((pairs >> 8) & 0xFF).to(tl.uint8), DTYPE)
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        first, second = first.to(DTYPE), second.to(DTYPE)
    return first, second


@triton.jit
def operand(queries, ELEMENT: tl.constexpr):
    """Queries as multiplied with page elements: two wide dtypes in float32; bytes are widened to the queries' dtype."""
    if queries.dtype != ELEMENT and ELEMENT.primitive_bitwidth > 8:
        queries = queries.to(tl.float32)
    return queries
