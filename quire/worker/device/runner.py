"""The model runner of a device: a plan is enqueued in the order of effects that `quire.step` documents, and returns
before any of it has run. Nothing here waits for the device or asks it for a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.kernels.triton.rows import StepColumns
from quire.models.interface import CausalLM
from quire.sampling.device.batch import DeviceSampleBatch
from quire.sampling.device.sampler import DeviceSampler, DeviceSamples
from quire.sampling.errors import NonFiniteLogitsError
from quire.step import StepPlan, StepResult
from quire.worker.device.block_copies import copy_rounds
from quire.worker.device.cuda_graphs import CudaGraphRunner
from quire.worker.device.graph_dispatch import Execution, ExecutionSettings, choose_execution
from quire.worker.device.inputs import HostColumns, add_columns, host_columns
from quire.worker.device.prompt_scores import PROMPT_LOGITS_ELEMENTS, DevicePromptScorer, PromptScores
from quire.worker.device.request_state import DeviceRequestState
from quire.worker.device.state import StepState
from quire.worker.device.upload import RowWrites, Section
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.nonfinite import report_nonfinite

Collect = Callable[[], StepResult]
"""Waits for a step's result and puts it together."""


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """R sampled rows. rows, lengths: [R] int64, the row of each and the position of its token. The sections hold those,
    the place among the T tokens whose logits are read, and the prompt's length."""

    rows: np.ndarray
    lengths: np.ndarray
    row_section: Section
    length_section: Section
    place_section: Section
    prompt_section: Section


@dataclass(frozen=True, slots=True)
class Launched:
    """What a step will have computed."""

    plan: StepPlan
    samples: DeviceSamples | None
    scores: list[PromptScores]


class DeviceModelRunner:
    """Holds the rows and enqueues plans over them.

    A token that the host does not know yet needs no care: the step that samples it writes it to its row, and steps run
    in order.
    """

    def __init__(
        self,
        model: CausalLM,
        passes: CudaGraphRunner,
        settings: ExecutionSettings,
        sampler: DeviceSampler,
        state: StepState,
        pages: PageTable,
        transfers: BlockTransfers,
        vocab_size: int,
    ) -> None:
        """pages: of the pool on the device. settings: which steps `passes` runs as graphs."""
        self._model = model
        self._passes = passes
        self._settings = settings
        self._sampler = sampler
        self._state = state
        self._pages = pages
        self._transfers = transfers
        self._prompt_scorer = DevicePromptScorer(
            model, sampler, state.arena.token_ids, state.requests, max(1, PROMPT_LOGITS_ELEMENTS // vocab_size)
        )

    def launch(self, plan: StepPlan) -> Collect:
        """Enqueue one plan."""
        self._transfers.wait()
        state = self._state
        writes = RowWrites()
        state.requests.update(plan, writes)
        upload = state.upload
        upload.begin()
        writes.add_to(upload)
        copies = [upload.add(np.array(pairs, np.int64)) for pairs in copy_rounds(plan.block_copies)]
        columns = host_columns(plan, state.requests)
        sections = add_columns(columns, upload)
        sampled = self._add_samples(plan, columns)
        upload.send()
        writes.apply(upload, state.arena.words)
        self._move_blocks(plan, copies)
        if not plan.seq_ids:
            return lambda: StepResult(plan.step_id, [])
        on_device = StepColumns(*map(upload.view, (sections.rows, sections.starts, sections.query_start)))
        hidden = self._forward(plan, columns, on_device)
        samples = None if sampled is None else self._sample(sampled, hidden)
        launched = Launched(plan, samples, self._prompt_scorer.score(hidden, columns))
        return self._collecting(launched)

    def capture_at_start(self) -> None:
        """Capture the graphs that steps must not wait for, before the first one."""
        self._passes.capture_at_start(self._padding)

    def capture_next(self) -> bool:
        """Capture one more graph, while nothing is under way; returns whether there was one left."""
        return self._passes.capture_next(self._padding)

    def _padding(self, execution: Execution) -> tuple[DeviceBatch, torch.Tensor]:
        return self._state.inputs.padding(execution.num_seqs, execution.num_tokens)

    def _move_blocks(self, plan: StepPlan, copies: list[Section]) -> None:
        """Swapping begins, and copy-on-write is done."""
        if plan.transfers is not None:
            self._transfers.start(plan.transfers.swap_out, plan.transfers.swap_in)
        if not plan.block_copies:
            return
        if self._transfers.is_reading(destination for _, destination in plan.block_copies):
            self._transfers.wait()
        for section in copies:
            copy_pages(self._pages, self._pages, self._state.upload.view(section))

    def _forward(self, plan: StepPlan, columns: HostColumns, on_device: StepColumns) -> torch.Tensor:
        """Hidden states, [T or more, hidden size]."""
        execution = choose_execution(columns.num_tokens, len(columns.rows), columns.max_query_len, self._settings)
        batch, token_ids = self._state.inputs.prepare(columns, on_device, execution.num_seqs, execution.num_tokens)
        swaps_out = plan.transfers is not None and plan.transfers.swap_out
        if swaps_out and self._transfers.is_reading(written_blocks(columns, self._state.requests)):
            self._transfers.wait()
        return self._passes.run(execution, batch, token_ids)

    def _add_samples(self, plan: StepPlan, columns: HostColumns) -> SampleColumns | None:
        """Put the columns of the sampled rows into the upload. From here on the rows count their new tokens."""
        if not plan.sample_seq_ids:
            return None
        requests, upload = self._state.requests, self._state.upload
        source = np.array(plan.sample_from, np.int64)
        rows, lengths = requests.rows_of(plan.sample_seq_ids), columns.ends[source]
        requests.lengths[rows] = lengths + 1
        return SampleColumns(
            rows,
            lengths,
            upload.add(rows),
            upload.add(lengths),
            upload.add(columns.query_start[1:][source] - 1),
            upload.add(requests.num_prompt_tokens[rows]),
        )

    def _sample(self, sampled: SampleColumns, hidden: torch.Tensor) -> DeviceSamples:
        """Choose the tokens, which the sampler writes to their rows."""
        view = self._state.upload.view
        logits = self._model.compute_logits(hidden.index_select(0, view(sampled.place_section)))
        batch = DeviceSampleBatch(
            rows_host=sampled.rows,
            rows=view(sampled.row_section),
            lengths=view(sampled.length_section),
            num_prompt_tokens=view(sampled.prompt_section),
            token_table=self._state.arena.token_ids,
        )
        return self._sampler.sample(logits, batch)

    def _collecting(self, launched: Launched) -> Collect:
        """Send what the host must know on its way, in one copy."""
        samples, scores = launched.samples, launched.scores
        tensors = [] if samples is None else list(samples.tensors())
        num_of_samples = len(tensors)
        tensors += [tensor for each in scores for tensor in each.tensors()]
        copy = self._state.streams.copy_out(tensors)

        def collect() -> StepResult:
            hosts = copy.wait()
            return _result(launched, hosts[:num_of_samples], hosts[num_of_samples:])

        return collect


def _result(launched: Launched, sampled: list[torch.Tensor], scored: list[torch.Tensor]) -> StepResult:
    plan = launched.plan
    result = StepResult(plan.step_id, [])
    nonfinite: tuple[int, ...] = ()
    if launched.samples is not None:
        tokens = launched.samples.assemble(sampled)
        result.token_ids, nonfinite = tokens.token_ids.tolist(), tokens.nonfinite
        result.logprobs, result.candidates = tokens.logprobs, tokens.candidates
    remaining, nonfinite_prompts = iter(scored), []
    for scores in launched.scores:
        try:
            result.prompt_logprobs[plan.seq_ids[scores.index]] = scores.assemble(remaining)
        except NonFiniteLogitsError:
            nonfinite_prompts.append(scores.index)
    if nonfinite or nonfinite_prompts:
        report_nonfinite(result, plan, nonfinite, nonfinite_prompts)
    return result


def written_blocks(columns: HostColumns, requests: DeviceRequestState) -> list[int]:
    """The blocks that the model writes keys and values to in this step, of all KV groups."""
    size = requests.tables.block_size
    first, last = columns.starts // size, (columns.ends - 1) // size
    counts = last - first + 1
    logical = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    entries = requests.tables.entries(np.repeat(columns.rows, counts), logical)
    blocks: list[int] = np.unique(np.concatenate(entries)).tolist()
    return blocks
