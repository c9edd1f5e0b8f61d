"""Rules of layer groups: needed blocks, and prefix hits. A state's block i holds the state after its last computed
token, a snapshot once full; a state is a window of two tokens."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.prefix_index import Findable

STATE_WINDOW = 2


class FullManager:
    """Manager of layers that read every earlier token; a sequence keeps every block until it ends."""

    keeps_all = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def first_needed_block(self, position: int) -> int:
        return 0

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Number of leading blocks found in the index."""
        for block in range(num_blocks):
            if index.find(hashes[block]) is None:
                return block
        return num_blocks

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return -(-num_tokens // self.block_size)


class SlidingManager:
    """Manager of states, and of layers in which a query at position p reads positions p - window + 1 .. p only."""

    keeps_all = False

    def __init__(self, block_size: int, window: int) -> None:
        self.block_size = block_size
        self._window = window

    def first_needed_block(self, position: int) -> int:
        return max(0, position - self._window + 1) // self.block_size

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Number of blocks of the longest prefix hit, which needs only the blocks that the next query reads."""
        hit = num_blocks
        while hit > 0:
            first = self.first_needed_block(hit * self.block_size)
            missing = next((b for b in range(hit - 1, first - 1, -1) if index.find(hashes[b]) is None), None)
            if missing is None:
                return hit
            hit = missing
        return 0

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        span = min(num_tokens, self._window - 1 + max_chunk)
        # A span of s tokens can start inside a block and so touch one block more than ceil(s / block size).
        touched = (span + self.block_size - 2) // self.block_size + 1
        return min(-(-num_tokens // self.block_size), touched)


class ChunkedManager(SlidingManager):
    """Manager of layers in which a query reads its own chunk, from the last multiple of the window on. A hit that ends
    with a chunk needs no block."""

    def first_needed_block(self, position: int) -> int:
        return position // self._window * self._window // self.block_size
