"""Which prefixes may be registered, so that every request that was accepted can still run, and one more can start."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import PromptTooLongError, UserError
from quire.kv_cache.manager import KVCacheManager
from quire.request import Request
from quire.scheduler.admission import blocks_at_most


class PrefixRegistration:
    """The prefixes on their way: their blocks are set aside from the acceptance on, until the KV manager pins them."""

    def __init__(self, kv: KVCacheManager, max_chunk: int) -> None:
        self._kv = kv
        self._max_chunk = max_chunk
        self._reserved: dict[str, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can count on."""
        return self._kv.num_unregistered_blocks - sum(self._reserved.values())

    def check_registration(self, prefix: Request, others: Iterable[Request]) -> None:
        """Raise UserError when `prefix` may not be registered beside `others`, all requests that have not ended."""
        kv = self._kv
        if not kv.enable_prefix_caching:
            raise UserError("a registered prefix needs enable_prefix_caching=True", param="enable_prefix_caching")
        if kv.is_registered(prefix.request_id):
            raise UserError(f"a prefix {prefix.request_id!r} is registered already", param="request_id")
        left = self.num_usable - blocks_at_most(prefix, kv, self._max_chunk)
        # A request that goes on behind the prefix computes one token and generates one; another has two.
        num_shared = prefix.num_prompt_tokens // kv.block_size
        behind = kv.most_blocks(prefix.num_prompt_tokens + 1, self._max_chunk) - num_shared * kv.num_groups_kept
        if left < max(behind, kv.num_groups):
            raise PromptTooLongError(
                f"a prefix of {prefix.num_prompt_tokens} tokens would leave {max(0, left)} KV blocks to requests, too "
                f"few for one that goes on behind it ({max(behind, kv.num_groups)}): give the KV cache more memory, or "
                "unregister other prefixes",
                param="prompt",
            )
        needed = max((blocks_at_most(r, kv, self._max_chunk) for r in others if not r.register_prefix), default=0)
        if left < needed:
            raise UserError(
                f"a prefix of {prefix.num_prompt_tokens} tokens would leave {left} KV blocks to requests, and one that "
                f"is running or waiting may need {needed}: register it later",
                param="prompt",
            )

    def reserve(self, prefix: Request) -> None:
        self._reserved[prefix.request_id] = blocks_at_most(prefix, self._kv, self._max_chunk)

    def release(self, prefix: Request) -> None:
        """The prefix is registered, or was given up."""
        del self._reserved[prefix.request_id]
