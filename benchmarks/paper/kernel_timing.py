"""Fig. 18a on this machine, as a trial: attention over blocks that lie anywhere, and over memory in one piece."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kernels.measure import Method
from quire.clock import SystemClock
from quire.errors import QuireError, UserError

BLOCK_SIZE = 16
SECONDS = 2.0
"""Of measuring, both kernels in turns."""
MIN_ROUNDS, MAX_ROUNDS = 9, 200


@dataclass(frozen=True)
class KernelTiming:
    """How much longer the native CPU kernel takes over blocks of 16, as a share: one token of each sequence, one
    thread. "In one piece" is a block as long as the context, a table of one entry."""

    num_sequences: int
    context: int
    """Tokens of each sequence: a power of two, as a block has to be."""

    def __call__(self) -> float:
        """Raises UserError where there are no native kernels, QuireError when the two do not agree."""
        try:
            from benchmarks.kernels.subjects.paged_kernel import PagedKernel
        except ImportError as error:
            raise UserError(f"Fig. 18a needs the native CPU kernels ({error}): name other --figures") from None
        kernels = [PagedKernel(self.num_sequences, self.context, size) for size in (BLOCK_SIZE, self.context)]
        if not kernels[0].agrees(kernels[1]):
            raise QuireError("attention over blocks and over memory in one piece differ")
        method = Method(SystemClock(), lambda: None, min_rounds=MIN_ROUNDS, max_rounds=MAX_ROUNDS)
        timings = method.measure({"blocks": kernels[0].run, "one piece": kernels[1].run}, SECONDS)
        # The quickest of each: what else the machine does only makes a sample longer.
        return min(timings["blocks"].samples) / min(timings["one piece"].samples) - 1
