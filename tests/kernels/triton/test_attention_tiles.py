"""How attention is cut up: within what devices have, and enough programs to fill them."""

from __future__ import annotations

import itertools

import pytest

from quire.kernels.triton.attention_tiles import (
    FIXED_KEYS,
    RESIDENT_PROGRAMS,
    SHARED_MEMORY,
    DeviceLimits,
    HeadShape,
    Tiles,
    fixed_split_plan,
    fixed_tiles,
    num_splits,
    resident_programs,
    scratch_rows,
    split_plan,
    split_tiles,
    varlen_tiles,
)

H200 = DeviceLimits((9, 0), 132)
QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
SHAPES = [
    HeadShape(group * 2, 2, dim, itemsize)
    for group, dim, itemsize in itertools.product((1, 3, 8, 16), (64, 80, 96, 128, 192, 256), (2, 4))
]
DEVICES = [DeviceLimits(capability, 100) for capability in SHARED_MEMORY] + [DeviceLimits((8, 1), 8)]


def shared_bytes(tiles: Tiles, shape: HeadShape) -> int:
    return (tiles.block_m + 2 * tiles.block_n * tiles.num_stages) * shape.dim * shape.itemsize


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: "sm_{}{}".format(*device.capability))
def test_tiles_fit_the_device(device: DeviceLimits) -> None:
    for shape in SHAPES:
        for tokens in (1, 2, 9, 40, 8192):
            varlen = [
                varlen_tiles(shape, tokens, longest, device, allow_warp_groups=allow_warp_groups)
                for longest in (tokens, 40_000)
                for allow_warp_groups in (False, True)
            ]
            kinds = [*varlen, split_tiles(shape, device), fixed_tiles(shape, device)]
            for tiles in kinds:
                assert shared_bytes(tiles, shape) <= device.shared_memory
                assert tiles.block_m % 16 == 0
                assert tiles.block_n >= 16
                assert tiles.tokens(shape.group) >= 1
                assert FIXED_KEYS % tiles.block_n == 0
                # Products, sums and scores of a thread stay in its registers.
                if shape.itemsize == 2:
                    num_threads = 32 * tiles.num_warps * (2 if tiles.uses_warp_groups else 1)
                    per_thread = tiles.block_m * (tiles.block_n + shape.dim) / num_threads
                    assert per_thread <= 192


def test_tiles_on_an_h200() -> None:
    """What the limits at the top of the module ask for."""
    assert varlen_tiles(QWEN3_8B, 8192, 8192, H200) == Tiles(128, 128, 8, 3)
    three_groups = Tiles(128, 128, 4, 2, uses_warp_groups=True)
    assert varlen_tiles(QWEN3_8B, 8192, 8192, H200, allow_warp_groups=True) == three_groups
    assert varlen_tiles(QWEN3_8B, 800, 1024, H200, allow_warp_groups=True) == Tiles(128, 64, 8, 2, max_registers=128)
    assert varlen_tiles(QWEN3_8B, 8192, 8192, DeviceLimits((8, 0), 108)) == Tiles(128, 64, 8, 3)
    assert split_tiles(QWEN3_8B, H200) == Tiles(16, 64, 4, 3)
    assert fixed_tiles(QWEN3_8B, H200) == Tiles(64, 64, 4, 3, FIXED_KEYS)
    for tiles in (split_tiles(QWEN3_8B, H200), fixed_tiles(QWEN3_8B, H200)):
        assert RESIDENT_PROGRAMS * shared_bytes(tiles, QWEN3_8B) <= H200.shared_memory


def test_programs_at_the_same_time() -> None:
    """As compiled: 71,680 bytes and 156 registers make three on a Hopper, an A100's memory takes two of them."""
    small = split_tiles(QWEN3_8B, H200)
    assert resident_programs(QWEN3_8B, small, H200) == 3
    assert resident_programs(QWEN3_8B, small, DeviceLimits((8, 0), 108)) == 2
    assert resident_programs(QWEN3_8B, fixed_tiles(QWEN3_8B, H200), H200) == 2
    wide = HeadShape(num_heads=8, num_kv_heads=4, head_dim=256, itemsize=2)
    assert resident_programs(wide, split_tiles(wide, H200), H200) == 2
    assert split_plan(QWEN3_8B, 1, 8192, H200).num_programs * 8 > 264, "one long sequence fills the third of them too"


def test_tiles_of_a_batch_invariant_mode_are_of_one_kind() -> None:
    """Nothing but the shape of heads and the device goes in."""
    plans = [fixed_split_plan(QWEN3_8B, seqs, 9000, window, H200) for seqs in (1, 7) for window in (None, 3000)]
    assert {plan.tiles for plan in plans if plan is not None} == {fixed_tiles(QWEN3_8B, H200)}
    assert all(plan is not None and plan.min_keys == FIXED_KEYS for plan in plans)


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 16, 24, 33, 40, 100, 131, 132, 256])
def test_splits_fill_the_device(num_seqs: int) -> None:
    slots = resident_programs(QWEN3_8B, split_tiles(QWEN3_8B, H200), H200) * H200.num_multiprocessors
    splits = num_splits(num_seqs * 8, 32768, 64, slots)
    programs = num_seqs * 8 * splits
    assert programs / (-(-programs // slots) * slots) >= 0.75
    assert programs < 4 * slots + num_seqs * 8
    if splits > 1:
        fewer = num_seqs * 8 * (splits - 1)
        assert fewer / (-(-fewer // slots) * slots) < 0.9


def test_short_sequences_are_not_cut_smaller_than_two_tiles() -> None:
    for length, most in ((1, 1), (128, 1), (129, 2), (1000, 8)):
        assert num_splits(8, length, 64, 396) <= most


def test_one_long_sequence_among_many_is_cut() -> None:
    """And short ones beside it are not: they have no second part."""
    plan = split_plan(QWEN3_8B, 256, 100_000, H200)
    assert plan.num_programs == 7
    assert plan.min_keys == 4096
    assert split_plan(QWEN3_8B, 256, 16_000, H200).num_programs == 1


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 500, 5000])
def test_scratch_for_the_longest_serves_all(fixed: bool, window: int | None) -> None:
    """The scratch is allocated for the longest sequences there can be, without a window."""

    def rows(num_seqs: int, length: int, seen: int | None) -> int:
        if not fixed:
            return scratch_rows(split_plan(QWEN3_8B, num_seqs, length, H200), QWEN3_8B, num_seqs)
        plan = fixed_split_plan(QWEN3_8B, num_seqs, length, seen, H200)
        return 0 if plan is None else scratch_rows(plan, QWEN3_8B, num_seqs)

    for num_seqs in (1, 3, 8, 16, 17, 60, 200):
        most = rows(num_seqs, 40960, None)
        assert all(rows(num_seqs, length, window) <= most for length in (1, 900, 1025, 5001, 17000, 40959))


def test_windows_span_at_most_the_splits_that_there_is_room_for() -> None:
    for window in (1, 1023, 1024, 1025, 3000):
        plan = fixed_split_plan(QWEN3_8B, 1, 40960, window, H200)
        spans = {(last // FIXED_KEYS) - max(0, last - window + 1) // FIXED_KEYS + 1 for last in range(40960)}
        assert max(spans) <= (1 if plan is None else plan.capacity)
