"""Token masks of a step's sampling inputs."""

from __future__ import annotations

import numpy as np

from quire.errors import QuireError
from quire.sampling.batch import TokenMasks
from quire.step import SamplingInputs, StepPlan
from quire.worker.pooling import generated_samples


def read_masks(
    inputs: SamplingInputs, plan: StepPlan, vocab_size: int, firsts: np.ndarray | None = None
) -> TokenMasks | None:
    """Token masks for a plan's sampled rows; None if no row has one. firsts: see SampleRows. Raises QuireError for
    inputs that do not fit the plan or the vocabulary."""
    num_words = -(-vocab_size // 32)
    masks, expected = inputs.masks, plan.masked_samples
    if inputs.step_id != plan.step_id or not (masks.keys() | inputs.draft_masks.keys()).issubset(expected):
        raise QuireError(f"the sampling inputs of step {inputs.step_id} are not those that step {plan.step_id} expects")
    if plan.pooled or firsts is not None:
        places = {index: place for place, index in enumerate(generated_samples(plan))}
        if firsts is None:
            masks = {places[index]: mask for index, mask in masks.items()}
        else:
            masks = _with_drafts(inputs, {index: places[index] for index in expected}, firsts, 4 * num_words)
    if not masks:
        return None
    if {*map(len, masks.values())} != {4 * num_words}:
        raise QuireError(f"a mask over {vocab_size} tokens has {4 * num_words} bytes")
    words = np.frombuffer(b"".join(masks.values()), "<u4").reshape(len(masks), num_words)
    return TokenMasks(np.array(list(masks), np.int64), words)


def _with_drafts(
    inputs: SamplingInputs, places: dict[int, int], firsts: np.ndarray, num_bytes: int
) -> dict[int, bytes]:
    """Packed token masks by row of logits, for samples with drafts. firsts: first row of each sample. places: index of
    a sample that expects masks -> its place among those with rows."""
    masks, nothing = {}, bytes(num_bytes)
    for index, place in places.items():
        first, count = int(firsts[place]), int(firsts[place + 1] - firsts[place])
        if index in inputs.masks:
            masks[first] = inputs.masks[index]
        known = inputs.draft_masks.get(index, [])[: count - 1]
        for row, mask in enumerate(known + [nothing] * (count - 1 - len(known)), first + 1):
            if mask:
                masks[row] = mask
    return masks
