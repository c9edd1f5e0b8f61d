"""Tiles and splits of attention on a device: pure functions of shapes and of the device, nothing is tried out while
serving.

What bounds attention, for H query heads, Hkv key heads (group G = H / Hkv), head size D, elements of b bytes:

- Decode reads each key and value once: 2 L Hkv D b bytes for a context of L tokens (L = 8192, Hkv = 8, D = 128,
  bfloat16: 33.5 MB, 7.8 us at an H200's measured 4.3 TB/s), and does 4 L H D operations, G for each byte in bfloat16:
  below the card's 180 (788 TFLOP/s measured over 4.3 TB/s) for every G <= 16, also when the 16 rows of the smallest
  tile of the matrix units are filled up with nothing. So: few rows, several loads in flight, and programs enough.
- A prompt of L tokens does 2 L^2 H D operations (half of 4 L^2 H D, being causal; L = 8192, H = 32: 550 GFLOP, 0.70 ms
  at 788 TFLOP/s). A tile of M rows does M operations for each byte of keys and values that it fetches from the L2
  cache: at 60 % of the peak 3.7 TB/s with M = 128, and with M = 64 7.4 TB/s, more than that cache gives. So: 128 rows.

Tiles are bounded by the shared memory that one program can have: M D b bytes of queries and, for each stage, 2 N D b of
keys and values; and by registers: M D sums and M N scores in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
"""KiB that one block can have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
SMALLEST_SHARED_MEMORY = 99
"""KiB that one block can have on cards of capability 8.0 and later that are not listed."""
SMALL_ROWS = 16
"""Rows of the smallest tile, the matrix units' own."""
MIDDLE_ROWS = 64
"""Rows of the tile for sequences that would leave most of a whole one empty, and of the one tile of batch-invariant
mode."""
ROWS = 128
"""Rows of a whole tile."""
RESIDENT_PROGRAMS = 2
"""Decode programs of a multiprocessor for which shared memory is left, whatever their tiles."""
SMALL_RESIDENT_PROGRAMS = 3
"""Decode programs of a multiprocessor that registers allow, with 16 rows and heads of up to 128 (156 registers; wider
ones have 196: two programs)."""
SCORES_BYTES = 2 << 10
"""Bytes of shared memory through which a small tile's weights go from one layout of registers to the other."""
RESERVED_MEMORY = 1 << 10
"""Bytes that CUDA takes of a multiprocessor for each program, and leaves one program short of."""
MAX_SPLITS = 64
"""More parts of a sequence are not worth their merging."""
LONGEST_SPLIT = 16384
"""Keys that one program reads at most, where there are programs enough: else one long sequence outlasts the others."""
FIXED_KEYS = 1024
"""Keys of a split in batch-invariant mode. Multiple of every tile."""
SHORT_CONTEXT = 1536
"""Tokens of sequences whose programs end too soon for one program to keep a multiprocessor of Hopper busy."""
SPLITTING_PAYS = 2048
"""Tokens of a sequence from which on its single new token gets the split kernel in a mixed batch; shorter ones get the
varlen kernel."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The device's limits. capability: compute capability. num_multiprocessors: their number. (Interpreted: those of an
    H200.)"""

    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132

    @property
    def shared_memory(self) -> int:
        """Bytes that one program can have."""
        return SHARED_MEMORY.get(self.capability, SMALLEST_SHARED_MEMORY) << 10


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The part of a layer that decides tiles. itemsize: bytes of an element that is multiplied (the wider of query and
    page)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dim(self) -> int:
        """head_dim as tiles have it: a power of two. The rest is zeros in registers, not bytes in memory."""
        return padded_dim(self.head_dim)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of an attention kernel. block_m: rows of queries (tokens x heads of a group). block_n: keys. num_warps,
    num_stages: Triton's. fixed_keys: the softmax is merged from parts of this many keys at fixed positions (0: it is
    not). max_registers: most registers of a thread (0: the compiler chooses). uses_warp_groups: one warp group copies
    and two of num_warps multiply (`prompt_attention`)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fixed_keys: int = 0
    max_registers: int = 0
    uses_warp_groups: bool = False

    def tokens(self, group: int) -> int:
        """Tokens in one tile."""
        return self.block_m // group

    @property
    def settings(self) -> dict[str, int]:
        """The settings that a kernel of these tiles is launched with."""
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return settings | ({"maxnreg": self.max_registers} if self.max_registers else {})


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A run of the split kernel over a batch. tokens: it computes sequences with at most this many new tokens.
    num_programs: programs of one sequence and key head. capacity: splits of one sequence and key head that the scratch
    has room for. min_keys: fewest keys of a split."""

    tiles: Tiles
    tokens: int
    num_programs: int
    capacity: int
    min_keys: int


def padded_dim(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


def varlen_tiles(
    shape: HeadShape, max_query_len: int, max_seq_len: int, limits: DeviceLimits, *, allow_warp_groups: bool = False
) -> Tiles:
    """Tiles of the kernels for prompts, which compute batches of sequences of various lengths ("varlen"): no more rows
    than the longest sequence has, up to 128, and as many keys as fit. On Hopper, as measured with heads of 128: two
    programs on a multiprocessor over short contexts, one of three warp groups over longer ones.

    max_query_len: new tokens of the sequence that has most; max_seq_len: tokens of the longest sequence.
    allow_warp_groups: `prompt_attention.allows_warp_groups` holds for the layer."""
    if shape.itemsize == 4:
        return _float32_tiles(shape)
    rows = max_query_len * shape.group
    if rows > MIDDLE_ROWS and limits.capability[0] == 9 and shape.dim == shape.head_dim == 128 and shape.group <= ROWS:
        if max_seq_len <= SHORT_CONTEXT:
            return Tiles(ROWS, 64, 8, 2, max_registers=128)
        if allow_warp_groups:
            return Tiles(ROWS, 128, 4, 2, uses_warp_groups=True)
    if rows > MIDDLE_ROWS:
        return _fitted(shape, ROWS, limits, limits.shared_memory)
    block_m = MIDDLE_ROWS if rows > SMALL_ROWS else SMALL_ROWS
    return _fitted(shape, block_m, limits, limits.shared_memory // RESIDENT_PROGRAMS)


def split_tiles(shape: HeadShape, limits: DeviceLimits) -> Tiles:
    """Tiles of the split kernel: as few rows as there can be, and memory for two programs on a multiprocessor."""
    if shape.itemsize == 4:
        return _float32_tiles(shape)
    return _fitted(shape, SMALL_ROWS, limits, limits.shared_memory // RESIDENT_PROGRAMS)


def fixed_tiles(shape: HeadShape, limits: DeviceLimits) -> Tiles:
    """The one kind of tile of batch-invariant mode, for prompts and for single tokens: rows get their bits from the
    order of additions inside a tile, and another size of tile is another instruction with an order of its own."""
    if shape.itemsize == 4:
        return replace(_float32_tiles(shape), fixed_keys=FIXED_KEYS)
    tiles = _fitted(shape, MIDDLE_ROWS, limits, limits.shared_memory // RESIDENT_PROGRAMS)
    return replace(tiles, fixed_keys=FIXED_KEYS)


def _float32_tiles(shape: HeadShape) -> Tiles:
    """No matrix unit keeps float32's precision: products are made by the ordinary ones, all operands in registers."""
    return Tiles(max(SMALL_ROWS, _power(shape.group)), 32, 4, 1)


def _fitted(shape: HeadShape, block_m: int, limits: DeviceLimits, shared_memory: int) -> Tiles:
    """The most keys in a tile, and then stages, that fit. Three stages: the loads of a tile have a whole tile's
    arithmetic to arrive in. On Hopper products take keys and values from shared memory, and only with 128 keys a tile
    do they read it slower than they multiply; earlier cards hold them in registers, where 64 keys are what fits."""
    block_m = max(block_m, _power(shape.group))
    # Warps in fours: a warp holds at least 16 rows, and 64 rows of 256 sums are too many for four.
    num_warps = 8 if block_m >= ROWS or (block_m == MIDDLE_ROWS and shape.dim > 128) else 4
    most_keys = 128 if shape.dim <= 64 or (block_m >= ROWS and limits.capability[0] >= 9) else 64
    left = shared_memory - block_m * shape.dim * shape.itemsize
    for block_n, num_stages in ((128, 3), (64, 3), (64, 2), (32, 3), (32, 2), (16, 2)):
        if block_n <= most_keys and 2 * block_n * shape.dim * shape.itemsize * num_stages <= left:
            return Tiles(block_m, block_n, num_warps, num_stages)
    return Tiles(block_m, 16, num_warps, 1)


def shared_bytes(shape: HeadShape, tiles: Tiles) -> int:
    """Shared memory of one program. Small tiles are multiplied from registers (mma.sync), and what is in registers
    needs no buffer: there are as many as stages less one. From 64 rows on, products on Hopper read the buffers."""
    buffers = tiles.num_stages - 1 if tiles.block_m < MIDDLE_ROWS else tiles.num_stages
    return (tiles.block_m + 2 * tiles.block_n * buffers) * shape.dim * shape.itemsize


def resident_programs(shape: HeadShape, tiles: Tiles, limits: DeviceLimits) -> int:
    """Decode programs that a multiprocessor runs at the same time."""
    if shape.itemsize == 4 or tiles.block_m > SMALL_ROWS or shape.dim > 128:
        return RESIDENT_PROGRAMS
    memory = limits.shared_memory + RESERVED_MEMORY
    return max(1, min(SMALL_RESIDENT_PROGRAMS, memory // (shared_bytes(shape, tiles) + SCORES_BYTES + RESERVED_MEMORY)))


def num_splits(num_programs: int, max_seq_len: int, block_n: int, slots: int) -> int:
    """Into how many parts sequences of up to `max_seq_len` keys are cut so that `num_programs` (sequences x key heads)
    times that many fill the device, which runs `slots` programs at the same time: the fewest with which the last round
    of programs leaves at most a tenth more of it idle than it would with the best number."""
    # Of many rounds the last one matters little, and parts of less than two tiles do not pay.
    most = max(1, min(MAX_SPLITS, -(-max_seq_len // (2 * block_n)), -(-4 * slots // num_programs)))

    def busy(splits: int) -> float:
        programs = num_programs * splits
        return programs / (-(-programs // slots) * slots)

    enough = 0.9 * max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= enough)


def split_plan(shape: HeadShape, num_seqs: int, max_seq_len: int, limits: DeviceLimits) -> SplitPlan:
    """The split kernel over `num_seqs` sequences, tiles and parts chosen for speed."""
    tiles = split_tiles(shape, limits)
    slots = resident_programs(shape, tiles, limits) * limits.num_multiprocessors
    splits = num_splits(num_seqs * shape.num_kv_heads, max_seq_len, tiles.block_n, slots)
    # Where sequences alone fill the device, only the long ones are cut.
    min_keys = LONGEST_SPLIT // 4 if splits == 1 else 2 * tiles.block_n
    splits = max(splits, min(MAX_SPLITS, -(-max_seq_len // LONGEST_SPLIT)))
    return SplitPlan(tiles, max(1, SMALL_ROWS // shape.group), splits, splits, min_keys)


def fixed_split_plan(
    shape: HeadShape, num_seqs: int, max_seq_len: int, window: int | None, limits: DeviceLimits
) -> SplitPlan | None:
    """The same in batch-invariant mode, or None where sequences alone fill the device: then the varlen kernel, which
    adds up the same parts in the same order, needs no scratch. What is chosen changes no bit."""
    slots = RESIDENT_PROGRAMS * limits.num_multiprocessors
    programs = num_seqs * shape.num_kv_heads
    capacity = -(-max_seq_len // FIXED_KEYS)
    if window is not None:
        # It may begin inside a split.
        capacity = min(capacity, -(-window // FIXED_KEYS) + 1)
    if programs >= slots // 2 or capacity == 1:
        return None
    return SplitPlan(fixed_tiles(shape, limits), 1, min(capacity, -(-slots // programs)), capacity, FIXED_KEYS)


def scratch_rows(plan: SplitPlan, shape: HeadShape, num_seqs: int) -> int:
    """Rows of partial results that a plan needs."""
    return num_seqs * shape.num_kv_heads * plan.capacity * plan.tokens * shape.group


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
