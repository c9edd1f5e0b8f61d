"""Log-probabilities of prompt tokens, chunk by chunk, for rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quire.sampling.results import Logprobs
from quire.step import PromptLogprobs, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.platform.interface import StepCompute
from quire.worker.request_state import RequestState


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of one sequence's chunk. index: in the batch. start: position of the first scored token."""

    index: int
    start: int
    slices: Sequence[Logprobs]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for each in self.slices for tensor in each.tensors()]

    def assemble(self, hosts: Iterator[torch.Tensor]) -> PromptLogprobs:
        """Prompt logprobs for the step's result. hosts: `tensors` on the host; all are consumed. Raises
        NonFiniteLogitsError."""
        parts = [(each, [next(hosts) for _ in each.tensors()]) for each in self.slices]
        entries: list[TokenLogprobs] = []
        for each, tensors in parts:
            entries += each.assemble(tensors)
        return PromptLogprobs(self.start, entries)


class PromptScorer:
    """Computes prompt logprobs. slice_rows: maximum positions whose logits exist at once."""

    def __init__(self, compute: StepCompute, requests: RequestState, slice_rows: int) -> None:
        self._compute = compute
        self._requests = requests
        self._sampling = requests.sampling
        self._slice_rows = slice_rows

    def score(self, hidden: torch.Tensor, batch: InputBatch) -> list[PromptScores]:
        """Score the prompt tokens that this step's positions predict (position p predicts token p + 1). hidden: [R,
        hidden size], the rows read."""
        asked = self._sampling.rows_with_prompt_logprobs
        if not asked:
            return []
        return [
            scores
            for index, row in enumerate(batch.rows.tolist())
            if row in asked and (scores := self._score_row(hidden, batch, index, row)) is not None
        ]

    def _score_row(self, hidden: torch.Tensor, batch: InputBatch, index: int, row: int) -> PromptScores | None:
        start, first = int(batch.starts[index]), int(batch.read_start[index])
        num_predicted = min(int(batch.ends[index]), int(self._requests.num_prompt_tokens[row]) - 1) - start
        num_top = int(self._sampling.num_prompt_logprobs[row])
        slices = []
        for done in range(0, num_predicted, self._slice_rows):
            count = min(self._slice_rows, num_predicted - done)
            part = hidden[first + done : first + done + count]
            slices.append(self._compute.score_prompt(part, row, start + done + 1, num_top))
        return PromptScores(index, start + 1, slices) if slices else None
