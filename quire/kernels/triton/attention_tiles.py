"""Tiles and splits of device attention, from shapes and device limits.

Memory bandwidth bounds decodes: few rows, several loads in flight, enough programs. Arithmetic bounds prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
"""Shared memory of a block in KiB by compute capability (CUDA C++ Programming Guide)."""
SMALLEST_SHARED_MEMORY = 99
"""The same on unlisted cards from capability 8.0 on."""
SMALL_ROWS = 16
"""Rows of the matrix units' smallest tile."""
MIDDLE_ROWS = 64
"""Rows of the tile for short sequences, and of batch-invariant mode's only tile."""
ROWS = 128
"""Rows of a full tile."""
RESIDENT_PROGRAMS = 2
"""Decode programs per multiprocessor for which shared memory is reserved."""
SMALL_RESIDENT_PROGRAMS = 3
"""Maximum decode programs per multiprocessor by registers (16 rows, heads up to 128; wider: two)."""
SCORES_BYTES = 2 << 10
"""Bytes of shared memory in which a small tile's weights change layout."""
RESERVED_MEMORY = 1 << 10
"""Bytes that CUDA uses per program on a multiprocessor."""
MAX_SPLITS = 64
"""Maximum parts of a sequence; more do not pay for merging."""
LONGEST_SPLIT = 16384
"""Maximum keys per program if there are enough programs."""
FIXED_KEYS = 1024
"""Keys of a split in batch-invariant mode; a multiple of every tile."""
SHORT_CONTEXT = 1536
"""Tokens below which one program per Hopper multiprocessor does not keep it busy."""
SPLITTING_PAYS = 2048
"""Tokens from which a single new token in a mixed batch uses the split kernel."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device; the interpreter uses an H200's. capability: compute capability."""

    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory per program."""
        return SHARED_MEMORY.get(self.capability, SMALLEST_SHARED_MEMORY) << 10


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a layer that determine tiles. itemsize: bytes of a multiplied element (the wider of query and
    page)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def dim(self) -> int:
        """head_dim padded to a power of two, in registers only."""
        return padded_dim(self.head_dim)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of an attention kernel. block_m: query rows (tokens x heads of a group). block_n: keys. num_warps,
    num_stages: Triton's. fixed_keys: the softmax merges parts of this many keys at fixed positions (0: none).
    max_registers: per thread (0: compiler's choice). uses_warp_groups: one warp group copies, two of num_warps multiply
    (`prompt_attention`)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fixed_keys: int = 0
    max_registers: int = 0
    uses_warp_groups: bool = False

    def tokens(self, group: int) -> int:
        """Tokens of a query tile: rows over the query heads of a key head (`group`)."""
        return self.block_m // group

    @property
    def settings(self) -> dict[str, int]:
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return settings | ({"maxnreg": self.max_registers} if self.max_registers else {})


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Run of the split kernel. tokens: maximum new tokens of its sequences. num_programs: per sequence and key head;
    capacity: splits, in the scratch. min_keys: a split's minimum."""

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
    """Tiles of the prompt kernels ("varlen"): at most the longest sequence's rows, up to 128, and as many keys as fit.
    max_query_len: most new tokens of a sequence; max_seq_len: most tokens. allow_warp_groups: result of
    `prompt_attention.allows_warp_groups`."""
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
    """Tiles of the split kernel: minimum rows, and memory for two programs per multiprocessor."""
    if shape.itemsize == 4:
        return _float32_tiles(shape)
    return _fitted(shape, SMALL_ROWS, limits, limits.shared_memory // RESIDENT_PROGRAMS)


def fixed_tiles(shape: HeadShape, limits: DeviceLimits) -> Tiles:
    """Batch-invariant mode's only tile, for prompts and single tokens."""
    if shape.itemsize == 4:
        return replace(_float32_tiles(shape), fixed_keys=FIXED_KEYS)
    tiles = _fitted(shape, MIDDLE_ROWS, limits, limits.shared_memory // RESIDENT_PROGRAMS)
    return replace(tiles, fixed_keys=FIXED_KEYS)


def _float32_tiles(shape: HeadShape) -> Tiles:
    """Tiles for float32, whose operands stay in registers."""
    return Tiles(max(SMALL_ROWS, _power(shape.group)), 32, 4, 1)


def _fitted(shape: HeadShape, block_m: int, limits: DeviceLimits, shared_memory: int) -> Tiles:
    """Tiles with the most keys, then stages, that fit the shared memory."""
    block_m = max(block_m, _power(shape.group))
    # Four or eight warps: a warp holds at least 16 rows, and 64 rows of 256 sums are too many for four warps.
    num_warps = 8 if block_m >= ROWS or (block_m == MIDDLE_ROWS and shape.dim > 128) else 4
    most_keys = 128 if shape.dim <= 64 or (block_m >= ROWS and limits.capability[0] >= 9) else 64
    left = shared_memory - block_m * shape.dim * shape.itemsize
    for block_n, num_stages in ((128, 3), (64, 3), (64, 2), (32, 3), (32, 2), (16, 2)):
        if block_n <= most_keys and 2 * block_n * shape.dim * shape.itemsize * num_stages <= left:
            return Tiles(block_m, block_n, num_warps, num_stages)
    return Tiles(block_m, 16, num_warps, 1)


def shared_bytes(shape: HeadShape, tiles: Tiles) -> int:
    buffers = tiles.num_stages - 1 if tiles.block_m < MIDDLE_ROWS else tiles.num_stages
    return (tiles.block_m + 2 * tiles.block_n * buffers) * shape.dim * shape.itemsize


def resident_programs(shape: HeadShape, tiles: Tiles, limits: DeviceLimits) -> int:
    """Decode programs that run concurrently on a multiprocessor."""
    if shape.itemsize == 4 or tiles.block_m > SMALL_ROWS or shape.dim > 128:
        return RESIDENT_PROGRAMS
    memory = limits.shared_memory + RESERVED_MEMORY
    return max(1, min(SMALL_RESIDENT_PROGRAMS, memory // (shared_bytes(shape, tiles) + SCORES_BYTES + RESERVED_MEMORY)))


def num_splits(num_programs: int, max_seq_len: int, block_n: int, slots: int) -> int:
    """Parts per sequence of up to `max_seq_len` keys, times `num_programs` (sequences x key heads) to fill `slots`
    concurrent programs: the fewest within a tenth of the best use."""
    # With many rounds the last one matters little, and parts of less than two tiles do not pay.
    most = max(1, min(MAX_SPLITS, -(-max_seq_len // (2 * block_n)), -(-4 * slots // num_programs)))

    def busy(splits: int) -> float:
        programs = num_programs * splits
        return programs / (-(-programs // slots) * slots)

    enough = 0.9 * max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= enough)


def split_plan(shape: HeadShape, num_seqs: int, max_seq_len: int, limits: DeviceLimits) -> SplitPlan:
    """SplitPlan with the lowest estimated time for `num_seqs` sequences."""
    tiles = split_tiles(shape, limits)
    slots = resident_programs(shape, tiles, limits) * limits.num_multiprocessors
    splits = num_splits(num_seqs * shape.num_kv_heads, max_seq_len, tiles.block_n, slots)
    # If the sequences fill the device, split only the long ones.
    min_keys = LONGEST_SPLIT // 4 if splits == 1 else 2 * tiles.block_n
    splits = max(splits, min(MAX_SPLITS, -(-max_seq_len // LONGEST_SPLIT)))
    return SplitPlan(tiles, max(1, SMALL_ROWS // shape.group), splits, splits, min_keys)


def fixed_split_plan(
    shape: HeadShape, num_seqs: int, max_seq_len: int, window: int | None, limits: DeviceLimits
) -> SplitPlan | None:
    """Split plan in batch-invariant mode; None if the sequences fill the device. It changes no bit."""
    slots = RESIDENT_PROGRAMS * limits.num_multiprocessors
    programs = num_seqs * shape.num_kv_heads
    capacity = -(-max_seq_len // FIXED_KEYS)
    if window is not None:
        # The window may begin inside a split.
        capacity = min(capacity, -(-window // FIXED_KEYS) + 1)
    if programs >= slots // 2 or capacity == 1:
        return None
    return SplitPlan(fixed_tiles(shape, limits), 1, min(capacity, -(-slots // programs)), capacity, FIXED_KEYS)


def scratch_rows(plan: SplitPlan, shape: HeadShape, num_seqs: int) -> int:
    """Rows of partial results that a plan needs."""
    return num_seqs * shape.num_kv_heads * plan.capacity * plan.tokens * shape.group


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
