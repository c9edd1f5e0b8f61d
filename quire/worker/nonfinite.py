"""What is said when a model computes NaN or infinite logits."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import QuireError
from quire.sampling.errors import NonFiniteLogitsError


def name_sequences(error: NonFiniteLogitsError, seq_ids: Sequence[int]) -> QuireError:
    """The error for people. seq_ids: of the rows that the error's indices count."""
    names = ", ".join(str(seq_ids[index]) for index in error.indices)
    return QuireError(
        f"the model computed NaN or infinite logits for sequence {names}; its weights are damaged or the dtype's "
        "range is too small for it (try dtype='float32')"
    )
