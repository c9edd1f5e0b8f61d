"""Executor of a model on several ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.executors.interface import VitalSigns, Workers
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import DeviceShare, MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import BlockKey, SamplingInputs, StepPlan, StepResult, StoreReport, TransferReport


class SampledTokens:
    """Tokens and drafts of a pipeline's last stage that the others do not have yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the results, which come on another thread than plans."""
        self._known: list[tuple[int, int, list[int]]] = []
        self._drafts: dict[int, list[int]] = {}
        self._awaited: dict[int, list[tuple[int, int] | None]] = {}
        """Step -> (sampled sequence, position of its first new token); None: no token is needed any more."""

    def bring(self, plan: StepPlan) -> StepPlan:
        with self._lock:
            known, self._known = self._known, []
            if plan.released:
                released = set(plan.released)
                for seq_id in released:
                    self._drafts.pop(seq_id, None)
                for samples in self._awaited.values():
                    samples[:] = [None if sample is None or sample[0] in released else sample for sample in samples]
            self._awaited[plan.step_id] = list(zip(plan.sample_seq_ids, plan.sampled_positions, strict=True))
            # Every stage must compute the same number of drafts, so none looks for its own.
            planned = compress(plan.seq_ids, plan.num_drafts)
            drafts = {seq_id: self._drafts.get(seq_id, []) for seq_id in planned} | plan.drafts
        return msgspec.structs.replace(plan, sampled=known, drafts=drafts) if known or drafts else plan

    def discard(self, inputs: SamplingInputs) -> None:
        with self._lock:
            for index in inputs.discarded:
                self._awaited[inputs.step_id][index] = None

    def take(self, result: StepResult) -> None:
        with self._lock:
            for index, sample in enumerate(self._awaited.pop(result.step_id)):
                if sample is not None and result.token_ids[index]:
                    seq_id, position = sample
                    self._known.append((seq_id, position, result.token_ids[index]))
                    self._drafts[seq_id] = result.draft_token_ids.get(index, [])


class RankedExecutor:
    """Executor over several ranks (`Workers`): sends calls to all, makes one result of theirs."""

    def __init__(self, workers: Workers, num_stages: int = 1) -> None:
        """num_stages: stages of a pipeline, each an equal run of neighbouring ranks."""
        self._workers = workers
        self._num_stages = num_stages
        self._sampled = SampledTokens() if num_stages > 1 else None
        self._transfers = TransferReports()

    def load_model(self) -> list[LayerSpec]:
        return alike(self._workers.call("load_model"))

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return reduce_profiles(self._workers.call("profile", max_num_batched_tokens, max_num_seqs))

    def allocate(self, layout: KVCacheLayout) -> None:
        self._workers.call("allocate", layout)

    def measure_preemption_costs(self) -> PreemptionCosts:
        return slowest(self._workers.call("measure_preemption_costs"))

    def describe_backend(self) -> str:
        lines: list[str] = self._workers.call("describe_backend")
        stages = f" in {self._num_stages} stages" if self._num_stages > 1 else ""
        return f"{lines[0]}, on each of {len(lines)} ranks{stages}"

    def expert_counts(self) -> list[list[int]]:
        """Counts of each stage's first rank, over the same rows as the others'."""
        return self._of_first_ranks("expert_counts")

    def expert_ranks(self) -> list[list[list[int]]]:
        return self._of_first_ranks("expert_ranks")

    def computing(self) -> AbstractContextManager[object]:
        """Empty context: the ranks are other processes."""
        return nullcontext()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        sampled = None if plan.is_dummy else self._sampled
        started = self._workers.execute(plan if sampled is None else sampled.bring(plan))
        agreed: Future[StepResult] = Future()
        agreed.set_running_or_notify_cancel()

        def settle(results: Future[list[StepResult]]) -> None:
            try:
                parts = results.result()
                result = agree(parts[-(len(parts) // self._num_stages) :])
                if sampled is not None:
                    sampled.take(result)
                result.encoder_seconds = max(part.encoder_seconds for part in parts)
                result.transfers = self._transfers.reduce([part.transfers for part in parts])
                agreed.set_result(result)
            except BaseException as error:  # the core waits for this future, so it must be completed
                agreed.set_exception(error)

        started.add_done_callback(settle)
        return agreed

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        if self._sampled is not None:
            self._sampled.discard(inputs)
        self._workers.send_sampling_inputs(inputs)

    def _of_first_ranks(self, method: str) -> list[Any]:
        found: list[list[Any]] = self._workers.call(method)
        return [layer for first in found[:: len(found) // self._num_stages] for layer in first]

    def idle(self) -> bool:
        """Return False: no rank has deferred work. Raises EngineDeadError if a rank has ended."""
        self._workers.check()
        return False

    def vital_signs(self) -> VitalSigns:
        return self._workers.vital_signs()

    def sleep(self, level: int) -> None:
        if self._sampled is not None:
            self._sampled = SampledTokens()  # the ranks forget all sequences
        self._workers.call("sleep", level)

    def wake_weights(self) -> None:
        self._workers.call("wake_weights")

    def wake_up(self) -> None:
        self._workers.call("wake_up")

    def shutdown(self) -> None:
        self._workers.close()


def alike(specs: Sequence[list[LayerSpec]]) -> list[LayerSpec]:
    """Layers' specs common to all ranks. Raises QuireError if ranks disagree."""
    first, *others = specs
    if any(each != first for each in others):
        raise QuireError("the ranks disagree on what the layers keep in the KV cache")
    return first


def slowest(costs: Sequence[PreemptionCosts]) -> PreemptionCosts:
    """Largest of each cost over the ranks: a step ends when every rank's does."""
    return PreemptionCosts(
        seconds_per_block=max(each.seconds_per_block for each in costs),
        seconds_per_token=max(each.seconds_per_token for each in costs),
    )


def reduce_profiles(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """One profile of all ranks: the least free memory, the largest activations and weights."""
    first = profiles[0]
    available = min(each.available for each in profiles)
    shares = [each.device for each in profiles if each.device is not None]
    device = None
    if first.device is None:
        available //= len(profiles)
    else:
        device = DeviceShare(
            total=min(each.total for each in shares),
            used=max(each.used for each in shares),
            graphs=max(each.graphs for each in shares),
            tables=max(each.tables for each in shares),
            host_available=min(each.host_available for each in shares) // len(shares),
        )
    return MemoryProfile(
        available=available,
        activations=max(each.activations for each in profiles),
        weights=max(each.weights for each in profiles),
        device=device,
    )


def agree(results: Sequence[StepResult]) -> StepResult:
    """First rank's result, with the failures of all. results: from the ranks that sample. Raises QuireError if the
    checksum of another rank differs."""
    first, *others = results
    for rank, other in enumerate(others, start=1):
        if (other.step_id, other.checksum) != (first.step_id, first.checksum):
            what = "pooled vectors" if first.pooled else "tokens"
            raise QuireError(f"ranks 0 and {rank} disagree on the {what} of step {first.step_id}")
        if other.nonfinite != first.nonfinite:
            first.nonfinite = sorted({*first.nonfinite, *other.nonfinite})
    return first


class TransferReports:
    """Merges the transfer reports of all ranks, which end transfers at their own times. A block is on disk, loaded or
    released when it is on every rank, and gone or failed when it is on one."""

    def __init__(self) -> None:
        self._last: list[StoreReport] = []
        """Each rank's last report, for its fields that are no events."""
        self._found: list[set[BlockKey]] = []
        self._loads: dict[int, list[bool]] = {}
        """Host block -> for each rank that has loaded it so far, whether that failed."""
        self._releases: Counter[int] = Counter()

    def reduce(self, reports: Sequence[TransferReport | None]) -> TransferReport | None:
        """Merge the ranks' reports of one step. reports: in rank order. None if no rank has one."""
        new = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not new:
            return None
        if not self._last:
            self._last = [StoreReport(is_scanning=True) for _ in reports]
            self._found = [set() for _ in reports]
        for rank, report in new:
            self._last[rank] = report
        merged = StoreReport(
            num_stored=sum(report.num_stored for _, report in new),
            num_store_failures=sum(report.num_store_failures for _, report in new),
            num_bytes=max(last.num_bytes for last in self._last),
            load_seconds=max(last.load_seconds for last in self._last),
            token_seconds=max(last.token_seconds for last in self._last),
            is_scanning=any(last.is_scanning for last in self._last),
        )
        for rank, report in new:  # removals first, like in the scheduler's half
            for key in report.gone:
                if all(key in found for found in self._found):
                    merged.gone.append(key)
                self._found[rank].discard(key)
        for rank, report in new:
            for key in report.found:
                self._found[rank].add(key)
                if all(key in found for found in self._found):
                    merged.found.append(key)
            self._end_loads(report, len(reports), merged)
        return merged

    def _end_loads(self, report: StoreReport, num_ranks: int, merged: StoreReport) -> None:
        for blocks, failed in ((report.loaded, False), (report.failed, True)):
            for block in blocks:
                ended = self._loads.setdefault(block, [])
                ended.append(failed)
                if len(ended) == num_ranks:
                    del self._loads[block]
                    (merged.failed if any(ended) else merged.loaded).append(block)
        for block in report.released:
            self._releases[block] += 1
            if self._releases[block] == num_ranks:
                del self._releases[block]
                merged.released.append(block)
