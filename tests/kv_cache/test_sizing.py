"""How many blocks the pool gets, and how layers share it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from quire.config.cache import CacheConfig
from quire.errors import InsufficientMemoryError
from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.coordinator import padding
from quire.kv_cache.layout import ALIGNMENT, KVCacheLayout, block_bytes, group_layers
from quire.kv_cache.sizing import DeviceShare, MemoryProfile, size_pool
from quire.kv_cache.spec import AttentionSpec, LatentSpec, SlidingWindowSpec, StateSpec

FULL = AttentionSpec(num_kv_heads=2, key_dim=8, value_dim=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(num_kv_heads=2, key_dim=8, value_dim=8, dtype_bytes=4, window=6)
TOKEN_BYTES = 2 * 2 * 8 * 4


def cache(
    memory: int | None = None, override: int | None = None, utilization: float = 0.5, swap_space: int | None = 0
) -> CacheConfig:
    return CacheConfig(
        block_size=16,
        memory=memory,
        memory_utilization=utilization,
        num_blocks_override=override,
        enable_prefix_caching=True,
        swap_space=swap_space,
    )


def size(config: CacheConfig, available: int = 10**9, activations: int = 0, max_num_seqs: int = 1000) -> KVCacheLayout:
    groups, layers_per_group = group_layers([FULL] * 4, 16)
    profile = MemoryProfile(available, activations, weights=0)
    return size_pool(groups, layers_per_group, config, profile, max_model_len=1024, max_num_seqs=max_num_seqs)


def test_kv_cache_memory_is_a_ceiling() -> None:
    layout = size(cache(memory=10 * 4 * 16 * TOKEN_BYTES + 5))
    assert layout.num_usable_blocks == 10
    assert layout.num_usable_blocks * layout.block_bytes <= 10 * 4 * 16 * TOKEN_BYTES + 5


def test_an_override_is_obeyed_to_the_block() -> None:
    assert size(cache(override=7), available=0).num_usable_blocks == 7


def test_free_memory_less_activations_times_utilization() -> None:
    bytes_per_block = 4 * 16 * TOKEN_BYTES
    layout = size(cache(utilization=0.25), available=1000 * bytes_per_block, activations=200 * bytes_per_block)
    assert layout.num_usable_blocks == 200


def test_engines_share_what_the_first_one_measured() -> None:
    """Each gets a third of what three times the weights leave: (1000 - 2 x 110) / 3, less its own activations."""
    block = 4 * 16 * TOKEN_BYTES
    groups, layers_per_group = group_layers([FULL] * 4, 16)
    profile = MemoryProfile(1000 * block, activations=20 * block, weights=110 * block)
    config = replace(cache(), num_replicas=3)
    layout = size_pool(groups, layers_per_group, config, profile, max_model_len=1024, max_num_seqs=1000)
    assert layout.num_usable_blocks == (260 - 20) // 2
    given = size_pool(
        groups, layers_per_group, replace(config, memory=30 * block), None, max_model_len=1024, max_num_seqs=9
    )
    assert given.num_usable_blocks == 30, "the configuration has divided it"


def test_no_more_blocks_than_all_sequences_at_full_length_can_use() -> None:
    assert size(cache(), available=10**12, max_num_seqs=3).num_usable_blocks == 3 * 64


def test_too_little_memory_says_the_arithmetic() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"one block of 16 tokens takes 8.0 KiB"):
        size(cache(), available=10_000, activations=9_000)


BLOCK_BYTES = 4 * 16 * TOKEN_BYTES


def test_swap_space_is_taken_off_before_the_cache_gets_its_share() -> None:
    layout = size(cache(swap_space=300 * BLOCK_BYTES + 5), available=1000 * BLOCK_BYTES, activations=200 * BLOCK_BYTES)
    assert (layout.num_usable_blocks, layout.num_host_blocks) == (250, 300)
    layout = size(cache(utilization=1.0, swap_space=300 * BLOCK_BYTES), available=1000 * BLOCK_BYTES)
    assert layout.num_usable_blocks + layout.num_host_blocks == 1000


def test_swap_space_beside_a_cache_of_given_size() -> None:
    layout = size(cache(override=7, swap_space=3 * BLOCK_BYTES), available=0)
    assert (layout.num_usable_blocks, layout.num_host_blocks) == (7, 3)
    assert size(cache(memory=10 * BLOCK_BYTES, swap_space=3 * BLOCK_BYTES), available=0).num_host_blocks == 3


def test_swap_space_by_default_is_four_gibibytes_but_half_of_what_is_free() -> None:
    roomy = size(cache(swap_space=None), available=2**40, max_num_seqs=10**6)
    assert roomy.num_host_blocks == 2**32 // BLOCK_BYTES
    tight = size(cache(swap_space=None), available=1000 * BLOCK_BYTES, activations=200 * BLOCK_BYTES)
    assert (tight.num_host_blocks, tight.num_usable_blocks) == (400, 200)
    beside = size(cache(override=300, swap_space=None), available=1000 * BLOCK_BYTES, activations=200 * BLOCK_BYTES)
    assert (beside.num_host_blocks, beside.num_usable_blocks) == (250, 300)
    few = size(cache(override=7, swap_space=None), available=2**40, max_num_seqs=3)
    assert few.num_host_blocks == 3 * 64, "no more than all sequences can use"


@pytest.mark.parametrize(
    ("config", "available"),
    [
        (cache(swap_space=BLOCK_BYTES - 1), 2**30),
        (cache(swap_space=None), BLOCK_BYTES),
        (cache(override=10, swap_space=None), 10 * BLOCK_BYTES),
    ],
)
def test_swap_space_for_no_block_is_an_error(config: CacheConfig, available: int) -> None:
    with pytest.raises(InsufficientMemoryError, match="no memory to swap to"):
        size(config, available=available)


def test_more_swap_space_than_memory_is_an_error() -> None:
    with pytest.raises(InsufficientMemoryError, match="swap space"):
        size(cache(swap_space=2000 * BLOCK_BYTES), available=1000 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("config", "is_given"),
    [(cache(), False), (cache(override=3), True), (cache(override=3, swap_space=None), False)],
)
def test_what_is_given_need_not_be_measured(config: CacheConfig, is_given: bool) -> None:
    assert config.is_size_given is is_given


def test_equal_layers_are_one_group() -> None:
    groups, layers_per_group = group_layers([FULL] * 5, 16)
    assert [group.layers for group in groups] == [(0, 1, 2, 3, 4)]
    assert block_bytes(groups, layers_per_group) == 5 * 16 * TOKEN_BYTES


def test_kinds_are_split_into_groups_of_one_size() -> None:
    groups, layers_per_group = group_layers([FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW], 16)
    assert layers_per_group == 2
    assert [group.layers for group in groups] == [(0, 3), (1, 2), (4, 5)]


def test_odd_counts_leave_pages_of_the_last_group_unused() -> None:
    groups, layers_per_group = group_layers([FULL] * 3 + [WINDOW] * 5, 16)
    assert layers_per_group == 3
    assert [len(group.layers) for group in groups] == [3, 3, 2]


def test_kinds_that_keep_less_of_a_token_get_blocks_of_more_tokens() -> None:
    """Four times the bytes of a token: a fourth of the tokens."""
    wide = AttentionSpec(num_kv_heads=8, key_dim=8, value_dim=8, dtype_bytes=4)
    groups, layers_per_group = group_layers([FULL, wide, FULL, wide], 16)
    assert layers_per_group == 2
    assert [(group.layers, group.block_size) for group in groups] == [((0, 2), 64), ((1, 3), 16)]
    assert {group.page_bytes for group in groups} == {64 * TOKEN_BYTES}
    assert block_bytes(groups, layers_per_group) == 2 * 64 * TOKEN_BYTES


def test_kinds_that_keep_tokens_fill_their_pages() -> None:
    latent = LatentSpec(width=100, dtype_bytes=2)
    groups, layers_per_group = group_layers([FULL, latent], 16)
    layout = KVCacheLayout(16, 10, groups, layers_per_group)
    assert [group.block_size % 16 for group in groups] == [0, 0]
    assert {group.page_bytes for group in groups} == {layout.page_bytes}
    assert layout.page_bytes % ALIGNMENT == 0
    assert padding(groups, layout.block_bytes, 1) == 0


def test_attention_takes_blocks_as_large_as_a_state_and_snapshots_lie_on_their_boundaries() -> None:
    state = StateSpec(num_bytes=1000 * TOKEN_BYTES)
    groups, layers_per_group = group_layers([state, FULL, state, state], 16, 1500)
    assert layers_per_group == 1
    assert [group.block_size for group in groups] == [2048, 2048, 2048, 1024]
    assert [group.page_bytes // TOKEN_BYTES for group in groups] == [1000, 1000, 1000, 1024]
    layout = KVCacheLayout(16, 10, groups, layers_per_group)
    assert layout.page_bytes == 1024 * TOKEN_BYTES
    assert [layout.kernel_blocks(group) for group in groups] == [1, 1, 1, 64]
    assert layout.token_groups == groups[3:]
    assert layout.state_groups == groups[:3]


def test_blocks_end_between_borders_where_that_pads_less() -> None:
    """A state of 260 tokens in a block of 320 leaves a fifth empty, one of 272 hardly anything."""
    groups, _ = group_layers([StateSpec(num_bytes=260 * TOKEN_BYTES), FULL], 16, 1000)
    assert [group.block_size for group in groups] == [1088, 272]


def test_states_alone_need_no_blocks_of_tokens() -> None:
    groups, layers_per_group = group_layers([StateSpec(num_bytes=1000)] * 3, 16, 100)
    assert [(group.layers, group.block_size) for group in groups] == [((0, 1, 2), 128)]
    assert block_bytes(groups, layers_per_group) == 3000


def test_hashes_chain_and_do_not_depend_on_how_they_were_extended() -> None:
    tokens = list(range(64))
    whole, steps = HashChain(16, "s"), HashChain(16, "s")
    whole.extend(tokens, 4)
    for num_blocks in range(1, 5):
        steps.extend(tokens, num_blocks)
    assert whole.hashes == steps.hashes
    changed = HashChain(16, "s")
    changed.extend([99, *tokens[1:]], 4)
    assert not set(changed.hashes[1:]) & set(whole.hashes)
    assert len(whole.block_hash(0)) == 32


def test_hashes_are_what_other_processes_have_stored() -> None:
    chain = HashChain(4, "tenant")
    chain.extend(list(range(8)), 2)
    root = hashlib.sha256(b"quire.kv.v1\0tenant").digest()
    first = hashlib.sha256(root + b"".join(token.to_bytes(4, "little") for token in range(4))).digest()
    assert chain.hashes[:2] == [root, first]


def test_an_extra_key_changes_its_block_and_those_behind_it() -> None:
    def hashes(keys: dict[int, tuple[bytes, ...]]) -> list[bytes]:
        chain = HashChain(16, "", keys)
        chain.extend(list(range(64)), 4)
        return chain.hashes[1:]

    plain = hashes({})
    known = set(plain)
    for keys in ({2: (b"image",)}, {2: (b"ima", b"ge")}, {2: (b"image", b"adapter")}, {2: (b"",)}):
        found = hashes(keys)
        assert found[:2] == plain[:2]
        assert not known & set(found[2:])
        known.update(found)


# A device with memory of its own

GIB = 2**30


def on_device(available: int = 60 * GIB, used: int = 20 * GIB, host: int = 64 * GIB) -> MemoryProfile:
    """80 GiB, of which this engine uses 20 by default, and others nothing."""
    device = DeviceShare(total=80 * GIB, used=used, graphs=2 * GIB, tables=GIB, host_available=host)
    return MemoryProfile(available, activations=5 * GIB, weights=16 * GIB, device=device)


def device_blocks(config: CacheConfig, profile: MemoryProfile, max_num_seqs: int = 10**6) -> KVCacheLayout:
    groups, layers_per_group = group_layers([FULL] * 4, 16)
    return size_pool(groups, layers_per_group, config, profile, max_model_len=1024, max_num_seqs=max_num_seqs)


def test_the_share_of_a_device_is_for_everything_on_it() -> None:
    """80 x 0.9 - 20 - 5 - 2 - 1."""
    assert device_blocks(cache(utilization=0.9), on_device()).num_usable_blocks == 44 * GIB // BLOCK_BYTES


def test_what_others_use_of_a_device_is_not_there() -> None:
    """30 are free: 30 - 5 - 2 - 1."""
    profile = on_device(available=30 * GIB)
    assert device_blocks(cache(utilization=0.9), profile).num_usable_blocks == 22 * GIB // BLOCK_BYTES


def test_two_engines_share_a_device() -> None:
    """The second one counts its own use alone: 80 x 0.45 - 20 - 5 - 2 - 1, though 36 more are in use."""
    profile = on_device(available=24 * GIB)
    assert device_blocks(cache(utilization=0.45), profile).num_usable_blocks == 8 * GIB // BLOCK_BYTES


def test_swapped_blocks_are_in_memory_of_the_host() -> None:
    full = device_blocks(cache(utilization=0.9, swap_space=8 * GIB), on_device())
    assert full.num_usable_blocks == 44 * GIB // BLOCK_BYTES
    assert full.num_host_blocks == 8 * GIB // BLOCK_BYTES
    tight = device_blocks(cache(utilization=0.9, swap_space=None), on_device(host=2 * GIB))
    assert (tight.num_usable_blocks, tight.num_host_blocks) == (full.num_usable_blocks, GIB // BLOCK_BYTES)
    given = device_blocks(cache(override=7, swap_space=None), on_device(host=2 * GIB))
    assert (given.num_usable_blocks, given.num_host_blocks) == (7, GIB // BLOCK_BYTES)


@pytest.mark.parametrize(
    ("profile", "utilization", "arithmetic"),
    [
        (
            on_device(used=70 * GIB, available=10 * GIB),
            0.9,
            "80.0 GiB x 0.9 - 70.0 GiB in use by this engine (16.0 GiB",
        ),
        (
            on_device(available=7 * GIB),
            0.9,
            "7.0 GiB free (80.0 GiB x 0.9 - 20.0 GiB in use by this engine would be 52",
        ),
        (on_device(), 0.2, "- 5.0 GiB activations - 2.0 GiB CUDA graphs - 1.0 GiB tables = 0 B, and one block of 16"),
    ],
)
def test_too_little_memory_on_a_device_says_the_arithmetic(
    profile: MemoryProfile, utilization: float, arithmetic: str
) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        device_blocks(cache(utilization=utilization), profile)
    assert arithmetic in str(caught.value)
