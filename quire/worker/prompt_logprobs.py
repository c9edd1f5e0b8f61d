"""Log-probabilities of prompt tokens, chunk after chunk, for the rows that ask for them."""

from __future__ import annotations

import numpy as np
import torch

from quire.models.interface import CausalLM
from quire.sampling.chooser import Chooser
from quire.sampling.errors import NonFiniteLogitsError
from quire.step import PromptLogprobs, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows


def compute_prompt_logprobs(
    model: CausalLM,
    chooser: Chooser,
    hidden: torch.Tensor,
    batch: InputBatch,
    requests: RequestRows,
    slice_rows: int,
) -> dict[int, PromptLogprobs]:
    """Batch index -> logprobs of the prompt tokens that this step's positions predict (position p predicts p + 1).

    hidden: [T, hidden size]. slice_rows: most positions whose logits exist at a time.
    Raises NonFiniteLogitsError with batch indices.
    """
    asked = requests.sampling.rows_with_prompt_logprobs
    if not asked:
        return {}
    found: dict[int, PromptLogprobs] = {}
    for index, row in enumerate(batch.rows.tolist()):
        if row not in asked:
            continue
        start = int(batch.starts[index])
        num_predicted = min(batch.ends[index], requests.num_prompt_tokens[row] - 1) - start
        if num_predicted <= 0:
            continue
        first = int(batch.first_index[index])
        targets = requests.token_ids[row, start + 1 : start + 1 + num_predicted].astype(np.int64)
        num_top = int(requests.sampling.num_prompt_logprobs[row])
        chunk = hidden[first : first + num_predicted]
        try:
            entries = _by_slices(model, chooser, chunk, targets, num_top, slice_rows)
        except NonFiniteLogitsError:
            raise NonFiniteLogitsError([index]) from None
        found[index] = PromptLogprobs(start + 1, entries)
    return found


def _by_slices(
    model: CausalLM, chooser: Chooser, hidden: torch.Tensor, targets: np.ndarray, num_top: int, slice_rows: int
) -> list[TokenLogprobs]:
    """hidden: [N, hidden size]; targets: [N] int64."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(targets), slice_rows):
        logits = model.compute_logits(hidden[start : start + slice_rows])
        tokens = targets[start : start + slice_rows]
        entries += chooser.logprobs(logits.numpy(), tokens, [num_top] * len(tokens))
    return entries
