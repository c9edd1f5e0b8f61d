"""The buddy allocator: tiling, coalescing and rounding under random use, and cases by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.buddy import BuddyAllocator, Chunk


def allocated(buddy: BuddyAllocator, num_units: int) -> Chunk:
    chunk = buddy.allocate(num_units)
    assert chunk is not None
    return chunk


@given(num_units=st.integers(1, 200), actions=st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=80))
def test_random_use_tiles_the_pool_and_everything_comes_back(num_units: int, actions: list[tuple[bool, int]]) -> None:
    buddy = BuddyAllocator(num_units)
    buddy.check()
    before = buddy.largest_free
    held: list[Chunk] = []
    for allocates, number in actions:
        if allocates:
            largest = buddy.largest_free
            chunk = buddy.allocate(number)
            rounded = 1 << (number - 1).bit_length()
            # It fails exactly when no chunk is large enough, however much is free in total.
            assert (chunk is None) == (rounded > largest)
            if chunk is not None:
                assert chunk.size == rounded
                assert chunk.requested == number
                held.append(chunk)
        elif held:
            buddy.free(held.pop(number % len(held)))
        buddy.check()
    assert sorted(held) == sorted(buddy.chunks)
    for chunk in held:
        buddy.free(chunk)
        buddy.check()
    assert buddy.num_free == num_units
    assert buddy.largest_free == before == buddy.largest


def test_splitting_leaves_the_other_halves() -> None:
    buddy = BuddyAllocator(16)
    chunk = allocated(buddy, 3)
    assert (chunk.size, buddy.num_free, buddy.largest_free) == (4, 12, 8)


def test_free_neighbours_that_are_no_buddies_stay_apart() -> None:
    """Units 2 to 5 are free and consecutive, but no chunk of four: that is external fragmentation."""
    buddy = BuddyAllocator(8)
    quarters = sorted(allocated(buddy, 2) for _ in range(4))
    buddy.free(quarters[1])
    buddy.free(quarters[2])
    assert buddy.num_free == 4
    assert buddy.allocate(4) is None
    buddy.free(quarters[0])
    assert allocated(buddy, 4).start == 0


def test_smallest_chunk_that_fits_is_taken() -> None:
    buddy = BuddyAllocator(8 + 2)
    assert allocated(buddy, 2).start == 8
    assert buddy.largest_free == 8


def test_a_pool_that_is_no_power_of_two() -> None:
    """982 blocks of 16 tokens, the paper's OPT-13B: seven requests of 2,048 tokens, and 86 blocks that none can use."""
    buddy = BuddyAllocator(982)
    chunks = [buddy.allocate(128) for _ in range(8)]
    assert chunks.index(None) == 7
    assert buddy.num_free == 982 - 7 * 128
