"""Registered prefixes (docs/prefixes.md): the paper's shared prefixes (§4.4). They own their blocks, so these are never
evicted. The last, partial block is copied before a sequence's first write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.layout import NULL_BLOCK


class RegisteredPrefix:
    __slots__ = ("blocks", "num_tokens", "tail")

    def __init__(self, blocks: BlockTable, num_tokens: int, tail: list[int]) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.tail = tail
        """Tokens of the prefix after its last full block."""


class RegisteredPrefixes:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._registered: dict[str, RegisteredPrefix] = {}
        self._by_parent: dict[bytes, list[RegisteredPrefix]] = {}
        """Hash of the last full block (or the chain's root) -> prefixes, the longest tail first."""
        self._counts: Counter[int] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._registered

    def __iter__(self) -> Iterator[RegisteredPrefix]:
        return iter(self._registered.values())

    def items(self) -> list[tuple[str, RegisteredPrefix]]:
        return list(self._registered.items())

    def holds(self, block: int) -> bool:
        return block in self._counts

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def most_tokens(self) -> int:
        return max([prefix.num_tokens for prefix in self], default=0)

    def insert(self, name: str, prefix: RegisteredPrefix) -> None:
        self._registered[name] = prefix
        siblings = self._by_parent.setdefault(self._parent(prefix), [])
        siblings.append(prefix)
        siblings.sort(key=lambda each: -each.num_tokens)
        self._counts.update(_blocks_of(prefix))

    def remove(self, name: str) -> RegisteredPrefix:
        """Remove a prefix and return it. Raises KeyError for an unknown name."""
        prefix = self._registered.pop(name)
        siblings = self._by_parent[self._parent(prefix)]
        siblings.remove(prefix)
        if not siblings:
            del self._by_parent[self._parent(prefix)]
        self._counts.subtract(_blocks_of(prefix))
        self._counts = +self._counts
        return prefix

    def longest(
        self, chain: HashChain, token_ids: Sequence[int], max_tokens: int, min_tokens: int = 0
    ) -> RegisteredPrefix | None:
        """Longest prefix of `min_tokens` to `max_tokens` tokens that `token_ids` starts with; None: none. The chain
        must cover the full blocks of `max_tokens`."""
        if not self._registered:
            return None
        size = self._block_size
        for num_blocks in range(max_tokens // size, min_tokens // size - 1, -1):
            for prefix in self._by_parent.get(chain.hashes[num_blocks], ()):
                is_in_range = min_tokens <= prefix.num_tokens <= max_tokens
                if is_in_range and list(token_ids[num_blocks * size : prefix.num_tokens]) == prefix.tail:
                    own = prefix.blocks.chain
                    assert own is not None
                    length = len(prefix.tail)
                    if chain.keys_before(num_blocks, length) == own.keys_before(num_blocks, length):
                        return prefix
        return None

    def _parent(self, prefix: RegisteredPrefix) -> bytes:
        assert prefix.blocks.chain is not None
        return prefix.blocks.chain.hashes[prefix.num_tokens // self._block_size]


def _blocks_of(prefix: RegisteredPrefix) -> list[int]:
    return [block for table in prefix.blocks.tables for block in table if block != NULL_BLOCK]
