"""The masks of a step, as they come with its sampling inputs."""

from __future__ import annotations

import numpy as np

from quire.errors import QuireError
from quire.sampling.batch import TokenMasks
from quire.step import SamplingInputs, StepPlan
from quire.worker.pooling import generated_samples


def read_masks(inputs: SamplingInputs, plan: StepPlan, vocab_size: int) -> TokenMasks | None:
    """None: no sample has one. Raises QuireError for inputs that do not fit the plan or the vocabulary."""
    num_words = -(-vocab_size // 32)
    unexpected = inputs.masks.keys() - set(plan.expects_sampling_inputs)
    if inputs.step_id != plan.step_id or unexpected:
        raise QuireError(f"the sampling inputs of step {inputs.step_id} are not those that step {plan.step_id} expects")
    if any(len(mask) != 4 * num_words for mask in inputs.masks.values()):
        raise QuireError(f"a mask over {vocab_size} tokens has {4 * num_words} bytes")
    if not inputs.masks:
        return None
    places = {index: place for place, index in enumerate(generated_samples(plan))}
    indices = np.array([places[index] for index in inputs.masks], np.int64)
    words = np.frombuffer(b"".join(inputs.masks.values()), "<u4").reshape(len(indices), num_words)
    return TokenMasks(indices, words)
