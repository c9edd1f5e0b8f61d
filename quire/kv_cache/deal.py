"""Division of a sequence's tokens among ranks that hold the same key heads (decode context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Deal:
    """Runs of `run` tokens go to `num_ranks` ranks in turns; this rank keeps those of number `rank`. Its own tokens are
    numbered without gaps, and fill its blocks. csrc/attention.h has the same arithmetic."""

    num_ranks: int = 1
    rank: int = 0
    run: int = 1

    def kept(self, counts: np.ndarray) -> np.ndarray:
        """Number of this rank's tokens among the first `counts` of a sequence."""
        rounds, rest = np.divmod(counts, self.num_ranks * self.run)
        found: np.ndarray = rounds * self.run + np.clip(rest - self.rank * self.run, 0, self.run)
        return found

    def keeps(self, positions: np.ndarray) -> np.ndarray:
        """True at each position whose token this rank keeps."""
        found: np.ndarray = positions // self.run % self.num_ranks == self.rank
        return found


ALL_TOKENS = Deal()
"""One rank keeps every token."""
