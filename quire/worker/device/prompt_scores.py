"""Log-probabilities of prompt tokens on the device, chunk after chunk, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quire.models.interface import CausalLM
from quire.sampling.results import Logprobs
from quire.sampling.sampler import Sampler
from quire.step import PromptLogprobs, TokenLogprobs
from quire.worker.device.inputs import HostColumns
from quire.worker.device.request_state import DeviceRequestState

PROMPT_LOGITS_ELEMENTS = 2**26
"""The logits of prompt positions are computed by slices of at most this many elements (at least one position)."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of one sequence's chunk, enqueued. index: in the batch. start: position of the first token scored."""

    index: int
    start: int
    slices: Sequence[Logprobs]

    def tensors(self) -> list[torch.Tensor]:
        """What must come to the host."""
        return [tensor for each in self.slices for tensor in each.tensors()]

    def assemble(self, hosts: Iterator[torch.Tensor]) -> PromptLogprobs:
        """hosts: `tensors` on the host, all of which are taken. Raises NonFiniteLogitsError."""
        parts = [(each, [next(hosts) for _ in each.tensors()]) for each in self.slices]
        entries: list[TokenLogprobs] = []
        for each, tensors in parts:
            entries += each.assemble(tensors)
        return PromptLogprobs(self.start, entries)


class DevicePromptScorer:
    """slice_rows: most positions whose logits exist at a time. token_table: [num_rows, width] int32, on the device."""

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler[torch.Tensor],
        token_table: torch.Tensor,
        requests: DeviceRequestState,
        slice_rows: int,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._token_table = token_table
        self._requests = requests
        self._slice_rows = slice_rows

    def score(self, hidden: torch.Tensor, columns: HostColumns) -> list[PromptScores]:
        """Enqueue what is asked for: position p predicts token p + 1 of the prompt. hidden: [T, hidden size]."""
        asked = self._requests.sampling.rows_with_prompt_logprobs
        if not asked:
            return []
        return [
            scores
            for index, row in enumerate(columns.rows.tolist())
            if row in asked and (scores := self._score_row(hidden, columns, index, row)) is not None
        ]

    def _score_row(self, hidden: torch.Tensor, columns: HostColumns, index: int, row: int) -> PromptScores | None:
        start, first = int(columns.starts[index]), int(columns.query_start[index])
        num_predicted = min(int(columns.ends[index]), int(self._requests.num_prompt_tokens[row]) - 1) - start
        num_top = int(self._requests.sampling.num_prompt_logprobs[row])
        slices = []
        for done in range(0, num_predicted, self._slice_rows):
            count = min(self._slice_rows, num_predicted - done)
            logits = self._model.compute_logits(hidden[first + done : first + done + count])
            # Straight from the row: the tokens need not be known here.
            targets = self._token_table[row, start + done + 1 : start + done + 1 + count]
            slices.append(self._sampler.logprobs(logits, targets, num_top))
        return PromptScores(index, start + 1, slices) if slices else None
