"""Content hashes of full blocks, chained: equal hashes mean equal tokens from position 0 on, in the same tenant.

h(-1) = SHA-256(root label, salt);  h(i) = SHA-256(h(i-1), token ids of block i as little-endian uint32, extra keys of
block i, each behind its length as little-endian uint32). A block is a hash block (quire/kv_cache/coordinator.py). Extra
keys tell apart content that the same tokens do not: the adapter, or the image that stands at a placeholder. A key of
one block holds for all blocks behind it, as each hash covers those before; keys of block -1 are the root's, hashed with
it, and so tell a partly filled first block apart too.
SHA-256 makes a collision (and so a wrong hit, or a probe into another tenant's prompts) infeasible; a predictable
hash in this place has been an advisory elsewhere. Values are the same in every process, so that the KV connector can
store them.
"""

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
"""The block whose keys are the root's."""


def _written(keys: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(key)) + key for key in keys)


class HashChain:
    """The hashes of one sequence's full blocks, extended as tokens become known."""

    __slots__ = ("_block_size", "_extra_keys", "hashes")

    def __init__(self, block_size: int, salt: str, extra_keys: Mapping[int, tuple[bytes, ...]] = NO_KEYS) -> None:
        """extra_keys: block index -> what else its content depends on."""
        self._block_size = block_size
        self._extra_keys = extra_keys
        root = hashlib.sha256(_ROOT_LABEL + salt.encode()).digest()
        of_root = extra_keys.get(ROOT)
        self.hashes: list[bytes] = [root if of_root is None else hashlib.sha256(root + _written(of_root)).digest()]
        """hashes[0] is the root; hashes[i + 1] belongs to block i."""

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash blocks up to `num_blocks`; their tokens must be in `token_ids`. Blocks hashed before cost nothing."""
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
        """Blocks hashed so far."""
        return len(self.hashes) - 1

    def block_hash(self, block: int) -> bytes:
        return self.hashes[block + 1]

    def num_shared(self, other: HashChain) -> int:
        """Leading blocks that both chains have. Logarithmic: a hash stands for all blocks before it, too."""
        mine, others = self.hashes, other.hashes
        known = range(1, min(len(mine), len(others)))
        return bisect.bisect_left(known, True, key=lambda block: mine[block] != others[block])

    def fork(self, num_blocks: int) -> HashChain:
        """A chain that shares the first `num_blocks` blocks and differs after them."""
        child = HashChain.__new__(HashChain)
        child._block_size = self._block_size
        child._extra_keys = self._extra_keys
        child.hashes = self.hashes[: num_blocks + 1]
        return child
