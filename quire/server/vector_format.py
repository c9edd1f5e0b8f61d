from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence

import msgspec
from fastapi import Response

from quire.errors import UserError
from quire.server.protocol.pooling import ListResponse, VectorFields

_FLOAT8 = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}
"""(bits of the fraction, bias of the exponent, code of the largest number)."""


def encoded(vector: list[float], body: VectorFields) -> list[float] | str:
    """Vector as a request wants it: numbers, or the base64 of their bytes."""
    return vector if body.encoding_format == "float" else base64.b64encode(_bytes(vector, body)).decode()


def bytes_response(body: VectorFields, answer: ListResponse, vectors: Sequence[list[float]]) -> Response:
    """Response of all vectors' bytes. Unless the request wants "bytes_only", the header `metadata` has the other
    fields."""
    parts = [_bytes(vector, body) for vector in vectors]
    headers = {}
    if body.encoding_format == "bytes":
        items, end = [], 0
        for index, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
            start, end = end, end + len(part)
            place = {"index": index, "start": start, "end": end, "shape": [len(vector)]}
            items.append({**place, "embed_dtype": body.embed_dtype, "endianness": body.endianness})
        told = {name: getattr(answer, name) for name in ("id", "created", "model")}
        headers["metadata"] = json.dumps({**told, "data": items, "usage": msgspec.to_builtins(answer.usage)})
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")


def _bytes(vector: list[float], body: VectorFields) -> bytes:
    kind, order = body.embed_dtype, ">" if body.endianness == "big" else "<"
    if kind in _FLOAT8:
        return _to_float8(vector, kind)
    if kind == "bfloat16":
        words = struct.unpack(f"<{len(vector)}I", struct.pack(f"<{len(vector)}f", *vector))
        return struct.pack(f"{order}{len(vector)}H", *(_to_bfloat16(word) for word in words))
    try:
        return struct.pack(f"{order}{len(vector)}{'e' if kind == 'float16' else 'f'}", *vector)
    except OverflowError:
        raise _too_large(kind) from None


def _to_bfloat16(word: int) -> int:
    return min(word + 0x7FFF + (word >> 16 & 1), 0xFFFFFFFF) >> 16


def _to_float8(vector: list[float], kind: str) -> bytes:
    import numpy as np  # slow to import; only these vectors need it

    num_bits, bias, largest = _FLOAT8[kind]
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> num_bits, codes & ((1 << num_bits) - 1)
    whole = (exponents > 0) << num_bits
    table = np.ldexp(fractions + whole, np.maximum(exponents, 1) - bias - num_bits)
    values = np.asarray(vector, np.float64)
    sizes = np.abs(values)
    above = np.searchsorted(table, sizes)
    step = table[-1] - table[-2]
    if not (sizes < table[-1] + step / 2).all():
        raise _too_large(kind)
    above = np.minimum(above, largest)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - sizes, sizes - table[below]
    found = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return bytes((found | (np.signbit(values) << 7)).astype(np.uint8))


def _too_large(kind: str) -> UserError:
    return UserError(f"a number is too large for {kind}", param="embed_dtype")
