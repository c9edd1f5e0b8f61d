"""Chained content hashes of full blocks: equal hashes mean equal tokens from position 0 on, in the same tenant. h(-1) =
SHA-256(root label, salt); h(i) = SHA-256(h(i-1), token ids of block i as little-endian uint32, extra keys of block i,
each after its length as little-endian uint32). Extra keys: other dependencies of the content, such as a placeholder's
image."""

from __future__ import annotations

import bisect
import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_ROOT_LABEL = b"quire.kv.v1\0"
NO_KEYS: Mapping[int, tuple[bytes, ...]] = MappingProxyType({})


ROOT = -1
"""Block index of keys that belong to the root of a hash chain."""
_PLACED = b"image"
_PLACE = struct.Struct("<q")


def placed_key(place: int, content: bytes) -> bytes:
    """Extra key of a block for an image that begins at `place` in it, below 0 if in an earlier block."""
    return _PLACED + _PLACE.pack(place) + content


def _is_before(key: bytes, num_tokens: int) -> bool:
    return not key.startswith(_PLACED) or _PLACE.unpack_from(key, len(_PLACED))[0] < num_tokens


def _written(keys: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(key)) + key for key in keys)


class HashChain:
    """Hashes of one sequence's full blocks, extended as tokens become known."""

    __slots__ = ("_block_size", "_extra_keys", "hashes")

    def __init__(self, block_size: int, salt: str, extra_keys: Mapping[int, tuple[bytes, ...]] = NO_KEYS) -> None:
        """Chain of a new sequence; block_size in tokens, salt: scope of sharing. extra_keys: block index -> further
        dependencies of its content."""
        self._block_size = block_size
        self._extra_keys = extra_keys
        root = hashlib.sha256(_ROOT_LABEL + salt.encode()).digest()
        of_root = extra_keys.get(ROOT)
        self.hashes: list[bytes] = [root if of_root is None else hashlib.sha256(root + _written(of_root)).digest()]
        """hashes[0] is the root's, hashes[i + 1] block i's."""

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the sequence's first `num_blocks` blocks; `token_ids` must have their tokens. No effect on blocks hashed
        before."""
        hashes, size, extra_keys = self.hashes, self._block_size, self._extra_keys
        first = len(hashes) - 1
        if num_blocks <= first:
            return
        contents = array("I", token_ids[first * size : num_blocks * size])
        if sys.byteorder == "big":
            contents.byteswap()
        encoded, num_bytes, sha256 = contents.tobytes(), size * contents.itemsize, hashlib.sha256
        previous = hashes[-1]
        for start in range(0, len(encoded), num_bytes):
            content = encoded[start : start + num_bytes]
            if extra_keys:
                content += _written(extra_keys.get(len(hashes) - 1, ()))
            previous = sha256(previous + content).digest()
            hashes.append(previous)

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) - 1

    def block_hash(self, block: int) -> bytes:
        return self.hashes[block + 1]

    def keys_before(self, block: int, num_tokens: int) -> list[bytes]:
        """Extra keys of the first tokens of a block, without those of images that begin behind them."""
        return [key for key in self._extra_keys.get(block, ()) if _is_before(key, num_tokens)]

    def num_shared(self, other: HashChain) -> int:
        """Number of leading blocks with equal hashes in both chains, in logarithmic time."""
        mine, others = self.hashes, other.hashes
        known = range(1, min(len(mine), len(others)))
        return bisect.bisect_left(known, True, key=lambda block: mine[block] != others[block])

    def fork(self, num_blocks: int) -> HashChain:
        child = HashChain.__new__(HashChain)
        child._block_size = self._block_size
        child._extra_keys = self._extra_keys
        child.hashes = self.hashes[: num_blocks + 1]
        return child
