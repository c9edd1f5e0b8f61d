"""Small integers from 32-bit words."""

from __future__ import annotations

import torch

WORD_BITS = 32


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, W] int32 -> [R, W * 32 / bits] uint8: the fields of each word, lowest bits first. bits: 4 or 8."""
    # Not contiguous(): it leaves the strides of dimensions of size 1 as they are, which view() does not take.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)


def per_word(bits: int) -> int:
    return WORD_BITS // bits


def recentre(values: torch.Tensor) -> torch.Tensor:
    """Subtract 128: uint8 0 to 255 -> int8, as IntegerWeight stores 8 bits."""
    return (values ^ 0x80).view(torch.int8)
