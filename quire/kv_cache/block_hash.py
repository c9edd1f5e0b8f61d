"""Content hashes of full blocks, chained: equal hashes mean equal tokens from position 0 on, in the same tenant.

h(-1) = SHA-256(root label, salt);  h(i) = SHA-256(h(i-1), token ids of block i as little-endian uint32).
SHA-256 makes a collision (and so a wrong hit, or a probe into another tenant's prompts) infeasible; a predictable
hash in this place has been an advisory elsewhere. Values are the same in every process, so that the KV connector can
store them.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Sequence

_ROOT_LABEL = b"quire.kv.v1\0"


class HashChain:
    """The hashes of one sequence's full blocks, extended as tokens become known."""

    __slots__ = ("_block_size", "hashes")

    def __init__(self, block_size: int, salt: str) -> None:
        self._block_size = block_size
        self.hashes: list[bytes] = [hashlib.sha256(_ROOT_LABEL + salt.encode()).digest()]
        """hashes[0] is the root; hashes[i + 1] belongs to block i."""

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash blocks up to `num_blocks`; their tokens must be in `token_ids`. Blocks hashed before cost nothing."""
        hashes, size = self.hashes, self._block_size
        for block in range(len(hashes) - 1, num_blocks):
            hashes.append(_hash_block(hashes[-1], token_ids[block * size : (block + 1) * size]))

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
        child.hashes = self.hashes[: num_blocks + 1]
        return child


def _hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
