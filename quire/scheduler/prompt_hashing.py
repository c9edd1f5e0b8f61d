"""Hashing of waiting prompts for the look-up in the prefix cache, so much of it in each pass of the scheduler.

The blocks of half a million tokens take tens of milliseconds to hash, in which no running sequence would get its next
token.
"""

from __future__ import annotations

import math

from quire.decoding.parallel import num_shared_tokens
from quire.decoding.sequence import Request
from quire.deferral import Deferral
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.admission import Limits, blocks_in_use

PIECE_TOKENS = 2**14
"""Hashed in a pass beside running sequences, over all long prompts: about a millisecond."""
SHORT_TOKENS = 2**10
"""Prompts with no more than this to hash never wait for it."""
HASHING_PROMPT = "hashing prompt"
"""The reason of the deferral."""


class PromptHashing:
    """What one scheduler hashes in its passes."""

    def __init__(self, kv: KVCacheManager, limits: Limits) -> None:
        self._kv = kv
        self._max_chunk = limits.max_chunk
        self.piece_tokens, self.short_tokens = PIECE_TOKENS, SHORT_TOKENS
        self._num_left: float = 0

    def begin_pass(self, *, is_idle: bool) -> None:
        """is_idle: no sequence runs, so that none waits for what is hashed, and nothing is put off."""
        self._num_left = math.inf if is_idle else self.piece_tokens

    def defer(self, request: Request) -> bool:
        """Hash what a waiting request's quote looks up, as far as this pass goes. Defers the request until the next
        pass when that is not all, and returns whether it does."""
        leader = request.live_sequences[0]
        if leader.chain is None or request.swapped_blocks:
            return False
        size = self._kv.block_size
        num_blocks = (num_shared_tokens(request) - 1) // size
        num_tokens = (num_blocks - leader.chain.num_blocks) * size
        if num_tokens <= self.short_tokens:
            return False  # the quote does it
        num_hashed = int(min(num_tokens, self._num_left)) // size
        leader.chain.extend(leader.token_ids, leader.chain.num_blocks + num_hashed)
        self._num_left -= num_hashed * size
        if leader.chain.num_blocks == num_blocks:
            return False
        num_needed = blocks_in_use(request, self._kv, self._max_chunk)
        request.deferral = Deferral(HASHING_PROMPT, num_needed, lambda: False)
        return True
