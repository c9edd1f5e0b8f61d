"""Plans on a device: staged writes update the request state, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch, TokenColumns
from quire.config.adapters import ADAPTER_SLOTS
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.kernels.triton.drafts import NOT_COMPUTED
from quire.kernels.triton.embedding import mean_rows
from quire.kernels.triton.rows import StepColumns
from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.parameters import SamplingRows
from quire.sampling.results import Deferred, Logprobs, Samples
from quire.sampling.sampler import Sampler
from quire.step import StepPlan, TokenValues
from quire.worker.columns import NO_LISTS, ColumnValues
from quire.worker.cuda_graphs import CudaGraphRunner
from quire.worker.drafts import NOTHING_ACCEPTED, Accepted, Placed
from quire.worker.graph_dispatch import Execution, choose_execution
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import Pairs
from quire.worker.platform.device_drafts import NO_TEXTS, DeviceDrafts, DraftSections
from quire.worker.platform.device_inputs import DeviceInputs, add_columns
from quire.worker.platform.interface import PendingCopy
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.streams import DeviceStreams
from quire.worker.platform.upload import RowWrites, Section, Upload
from quire.worker.pooling import PooledRows
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows

PROMPT_LOGITS_ELEMENTS = 2**26

Launch = Callable[[StepPlan], object]


class StagedColumns:
    """RequestColumns in device memory (the arena); changes are staged until a step writes them."""

    def __init__(
        self, arena: StateArena, sampling: SamplingRows, values: ColumnValues, drafts: DeviceDrafts | None = None
    ) -> None:
        self.arena = arena
        self.drafts = drafts
        self.texts = NO_TEXTS if drafts is None else drafts.texts
        self.sampling = sampling
        self.values = values
        self._writes = RowWrites()

    def take_writes(self) -> RowWrites:
        """Writes staged since the last call, in order."""
        writes, self._writes = self._writes, RowWrites()
        return writes

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        self._writes.write(self.arena.token_offset(row, position), np.array(token_ids, np.int32))
        self.texts.write_tokens(row, position, token_ids)

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        arena = self.arena
        self._writes.copy(arena.token_offset(source), arena.token_offset(destination), num_tokens)
        self.texts.copy_tokens(source, destination, num_tokens)

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        """Start a text on the host, and write what an oracle replays."""
        self.texts.begin_text(row, num_tokens, scope, prediction)
        oracle, arena = None if self.drafts is None else self.drafts.oracle, self.arena
        if oracle is not None:
            oracle.begin_text(row, num_tokens, scope, prediction)
            self._writes.write(arena.text_offset(row), oracle.padded_text(row, arena.drafts.token_width))

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        arena = self.arena
        self.texts.copy_text(source, destination, num_tokens)
        if self.drafts is not None and self.drafts.oracle is not None:
            self._writes.copy(arena.text_offset(source), arena.text_offset(destination), arena.drafts.token_width)

    def end_text(self, row: int, num_tokens: int) -> None:
        self.texts.end_text(row, num_tokens)

    def write_blocks(self, row: int, group: int, start: int, entries: Sequence[int] | np.ndarray) -> None:
        self._writes.write(self.arena.block_offset(row, group, start), entries)

    def copy_blocks(self, source: int, destination: int, group: int, num_entries: int) -> None:
        arena = self.arena
        self._writes.copy(arena.block_offset(source, group), arena.block_offset(destination, group), num_entries)

    def write_sampling(self, row: int) -> None:
        self._writes.write(self.arena.parameters_offset(row), self.sampling.words(row))
        if self.drafts is not None:
            self.drafts.forget(row)
            self._writes.write(self.arena.drafts.computed + row, [NOT_COMPUTED])

    def write_values(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = NO_LISTS) -> None:
        self.values.set(row, values, lists)
        self._writes.write(self.arena.values_offset(row), self.values.rows[row].copy())

    def copy_values(self, source: int, destination: int) -> None:
        self.values.copy(source, destination)
        self._writes.write(self.arena.values_offset(destination), self.values.rows[source].copy())
        if self.drafts is not None:
            self.drafts.copy(source, destination)

    def place_drafts(self, plan: StepPlan, requests: RequestState) -> Placed:
        assert self.drafts is not None, "the plan has drafts, and the engine makes none"
        return self.drafts.place(plan, requests)

    def input_batch(
        self, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int], rows_version: int
    ) -> InputBatch:
        return InputBatch.of_plan(rows, starts, counts)


class DeviceCompute:
    """Computes plans on a GPU (StepCompute)."""

    def __init__(
        self,
        passes: CudaGraphRunner,
        columns: StagedColumns,
        inputs: DeviceInputs,
        upload: Upload,
        pages: PageTable | None,
        streams: DeviceStreams,
        sampler: Sampler[torch.Tensor],
        *,
        has_head: bool,
    ) -> None:
        """pages: device pool (None: no pool). has_head: pooled samples go through `CausalLM.compute_logits`."""
        self.prepare: Callable[[Launch], None] | None = None
        self.samples, self.tells_drafts = True, False
        self.has_drafts = columns.drafts is not None
        self.writes_ahead = columns.drafts is not None and columns.drafts.writes_blocks
        self.reads_all = columns.drafts is not None and columns.drafts.reads_all
        self.columns = columns
        self.prompt_logits_elements = PROMPT_LOGITS_ELEMENTS
        self.model = passes.model
        self.passes = passes
        self.inputs = inputs
        self.upload = upload
        self.pages = pages
        self.streams = streams
        self.sampler = sampler
        self.has_head = has_head
        self.token_table = columns.arena.token_ids

    def stage(
        self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, pooled: PooledRows | None
    ) -> DeviceStep:
        upload, writes = self.upload, self.columns.take_writes()
        upload.begin()
        writes.add_to(upload)
        copies = [upload.add(np.array(pairs, np.int64)) for pairs in copy_rounds(plan.block_copies)]
        columns = add_columns(batch, upload, self.columns.values)
        logits_rows = None if batch.logits_rows is None else upload.add(batch.logits_rows)
        overlaid = None if batch.overlay is None else upload.add(batch.overlay.rows)
        sampled = [] if samples is None else [upload.add(column) for column in samples.columns]
        read = samples if pooled is None else pooled
        slots = None if read is None else self.columns.values.of_rows(ADAPTER_SLOTS, read.rows)
        read_slots = None if slots is None else upload.add(slots.numpy())
        pooled_rows = None if pooled is None else (upload.add(pooled.starts), upload.add(pooled.ends))
        drafts = None
        if self.columns.drafts is not None and len(batch.rows):
            drafts = self.columns.drafts.stage(plan, batch, samples, upload)
        upload.send()
        writes.apply(upload, self.columns.arena.words)
        sections = columns, logits_rows, overlaid, sampled, read_slots, pooled_rows
        return DeviceStep(self, batch, copies, *sections, drafts)

    def score_prompt(self, hidden: torch.Tensor, row: int, start: int, num_top: int) -> Logprobs:
        # Straight from the row: the tokens need not be known here.
        targets = self.token_table[row, start : start + len(hidden)]
        slots = self.columns.values.of_rows(ADAPTER_SLOTS, np.array([row]))
        if slots is not None:
            slots = torch.full((len(hidden),), int(slots), device=hidden.device)
        return self.sampler.logprobs(self.model.compute_logits(hidden, slots), targets, num_top)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> PendingCopy:
        return self.streams.copy_out(tensors)

    def warm_up(self, launch: Launch) -> None:
        if self.prepare is not None:
            self.prepare(launch)

    def capture_next(self) -> bool:
        return self.passes.capture_next(self.padding)

    def padding(self, execution: Execution) -> tuple[DeviceBatch, TokenColumns]:
        return self.inputs.padding(execution.num_seqs, execution.num_tokens)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One plan in progress on a GPU. Sections are places in the upload. columns: fields of StepColumns, in order;
    sampled: `SampleRows.columns`. read_slots: adapters'."""

    compute: DeviceCompute
    batch: InputBatch
    copies: Sequence[Section]
    columns: Sequence[Section]
    logits_rows: Section | None
    overlaid: Section | None
    sampled: Sequence[Section]
    read_slots: Section | None
    pooled: tuple[Section, Section] | None
    drafts: DraftSections | None

    def copy_blocks(self) -> None:
        pages, upload = self.compute.pages, self.compute.upload
        for section in self.copies:
            assert pages is not None, "blocks that are copied lie in a pool"
            copy_pages(pages, pages, upload.view(section))

    def forward(self) -> torch.Tensor:
        batch, compute = self.batch, self.compute
        settings, overlay = compute.passes.settings, None
        if batch.overlay is not None and self.overlaid is not None:
            settings, overlay = settings.without_full(), batch.overlay.over(compute.upload.view(self.overlaid).long())
        execution = choose_execution(
            batch.num_tokens, len(batch.rows), batch.max_query_len, settings, is_decode=batch.is_decode
        )
        if compute.columns.values.has(ADAPTER_SLOTS, batch.rows):
            execution = replace(execution, adapts=True)
        on_device = StepColumns(*map(compute.upload.view, self.columns))
        drafts = compute.columns.drafts
        if drafts is not None and self.drafts is not None:
            drafts.apply(on_device, self.drafts, compute.upload)
            drafts.make(on_device, self.drafts, compute.upload)
        inputs, columns = compute.inputs.prepare(batch, on_device, execution.num_seqs, execution.num_tokens)
        if drafts is not None:
            drafts.keep_token_ids(columns.token_ids)
        rows = None if self.logits_rows is None else compute.upload.view(self.logits_rows)
        result = compute.passes.run(execution, inputs, columns, rows, overlay)
        if drafts is not None:
            drafts.keep_results(result)
        return result.hidden

    def sample(self, hidden: torch.Tensor, samples: SampleRows, masks: TokenMasks | None) -> Samples:
        compute = self.compute
        rows, lengths, last_index, num_prompt_tokens = map(compute.upload.view, self.sampled)
        drafts = compute.columns.drafts
        if drafts is not None and self.drafts is not None:
            lengths = drafts.correct_lengths(lengths, self.drafts, compute.upload)
        logits = compute.model.compute_logits(hidden.index_select(0, last_index), self._read_slots)
        batch = SampleBatch(samples.rows, rows, lengths, num_prompt_tokens, compute.token_table)
        return compute.sampler.sample(logits, batch, masks)

    @property
    def _read_slots(self) -> torch.Tensor | None:
        return None if self.read_slots is None else self.compute.upload.view(self.read_slots).long()

    def accept(
        self, hidden: torch.Tensor, samples: Samples | None, sampled: SampleRows | None, requests: RequestState
    ) -> Accepted:
        compute, drafts = self.compute, self.compute.columns.drafts
        assert drafts is not None, "accepted where there are drafts"
        assert self.drafts is not None, "staged with the plan"
        on_device = StepColumns(*map(compute.upload.view, self.columns))
        if samples is None or sampled is None:
            drafts.follow(on_device, self.drafts, compute.upload)
            return NOTHING_ACCEPTED
        rows, lengths = map(compute.upload.view, self.sampled[:2])
        lengths = drafts.correct_lengths(lengths, self.drafts, compute.upload)
        accepted = drafts.accept(samples.token_ids.tensors[0], rows, lengths, self.drafts, compute.upload)
        drafts.follow(on_device, self.drafts, compute.upload)
        return accepted if sampled.firsts is not None else accepted._replace(counts=None)

    def pool(self, hidden: torch.Tensor, pooled: PooledRows) -> Deferred[np.ndarray]:
        assert self.pooled is not None, "staged with the plan"
        compute = self.compute
        starts, ends = map(compute.upload.view, self.pooled)
        vectors = hidden.index_select(0, starts) if pooled.are_single else mean_rows(hidden, starts, ends)
        if compute.has_head:
            vectors = compute.model.compute_logits(vectors, self._read_slots)
        return Deferred((vectors.float(),), lambda hosts: next(hosts).numpy())


def copy_rounds(copies: Pairs) -> Iterator[Pairs]:
    """Split (source, destination) pairs into rounds in which no block is both, so each round may run in any order."""
    remaining = copies
    while remaining:
        sources = {source for source, _ in remaining}
        ready = [pair for pair in remaining if pair[1] not in sources]
        assert ready, "block copies form a cycle"
        yield ready
        remaining = [pair for pair in remaining if pair[1] in sources]
