from __future__ import annotations

from collections.abc import Sequence

from quire.errors import QuireError


class NonFiniteLogitsError(QuireError):
    """Error of a prompt's log-probabilities: the model computed NaN or infinite logits. indices: rows."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(f"the model computed NaN or infinite logits (rows {', '.join(map(str, indices))})")
        self.indices = tuple(indices)
