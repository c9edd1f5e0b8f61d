"""Seconds of swapping and recomputing on this machine, measured once before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.kv_cache.layout import KVCacheLayout
from quire.models.interface import CausalLM
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.platform.interface import MemoryMeter, StepLimits

COPIED_BYTES = 16 * 2**20
"""Bytes copied each way: more than the caches hold, little beside the pools."""
TIMED_TOKENS = 512
NUM_REPEATS = 3
"""Number of runs, of which the fastest counts; the first warms up."""


def time_copies(transfers: BlockTransfers, layout: KVCacheLayout) -> float:
    """Seconds to copy one block to the host or back. Overwrites blocks of both pools with zeros."""
    num_blocks = min(layout.num_usable_blocks, layout.num_host_blocks, max(1, COPIED_BYTES // layout.block_bytes))
    pairs = [(block, block) for block in range(1, num_blocks + 1)]

    def copy() -> None:
        transfers.start(pairs, pairs)
        transfers.synchronize()

    return fastest(copy) / (2 * num_blocks)


def time_prompt(model: CausalLM, limits: StepLimits, meter: MemoryMeter, synchronize: Callable[[], None]) -> float:
    """Seconds per token of a prompt computed many tokens at a time. synchronize: waits for the device. Only the forward
    pass over short sequences is timed."""
    num_tokens = min(limits.max_num_tokens, TIMED_TOKENS)
    prompt = InputBatch.dummy_prompts(num_tokens, min(num_tokens, limits.longest))
    forward = meter.dummy_pass(model, limits, prompt)

    def compute() -> None:
        forward()
        synchronize()

    return fastest(compute) / num_tokens


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of NUM_REPEATS runs."""
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
