"""Swapping on the worker: copies between two pools, beside the forward pass and never against it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from quire.kernels.cpu import paged_attention
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.step import HostTransfers, NewSequence, StepPlan, StoreReport, StoreTransfers
from quire.worker.kv_connector.interface import NoWorkerConnector, WorkerConnector
from quire.worker.kv_transfer import NoTransfers, Pairs
from quire.worker.platform import cpu_blocks
from quire.worker.platform.cpu_blocks import BlockMover, ThreadTransfers, move_blocks
from quire.worker.preemption_costs import NUM_REPEATS, TIMED_TOKENS
from tests.worker.driver import GREEDY

MOVERS: list[BlockMover] = [move_blocks, paged_attention.move_blocks]
Pages = list[torch.Tensor]


def random_pages(num_blocks: int, page_bytes: int = 96) -> Pages:
    return [torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8) for _ in range(3)]


@pytest.mark.parametrize("move", MOVERS)
def test_whole_blocks_of_every_page(move: BlockMover) -> None:
    sources, destinations = random_pages(9), random_pages(5)
    before = [page.clone() for page in destinations]
    move(sources, destinations, [(8, 1), (2, 4), (2, 3)])
    for source, destination, old in zip(sources, destinations, before, strict=True):
        expected = old.clone()
        expected[[1, 4, 3]] = source[[8, 2, 2]]
        assert torch.equal(destination, expected)


@pytest.mark.parametrize("move", MOVERS)
@pytest.mark.parametrize("pairs", [[(9, 1)], [(1, 5)], [(2, 2), (-10, 1)]])
def test_blocks_that_do_not_exist(move: BlockMover, pairs: Pairs) -> None:
    with pytest.raises((ValueError, IndexError)):
        move(random_pages(9), random_pages(5), pairs)


def test_native_moves_check_their_pages() -> None:
    pages = random_pages(5)
    for others in (random_pages(5, 95), [page.view(torch.int8) for page in pages], [page.T for page in pages]):
        with pytest.raises(ValueError, match="page"):
            paged_attention.move_blocks(pages, others, [(1, 1)])
    with pytest.raises(ValueError, match="pages"):
        paged_attention.move_blocks(pages, pages[:2], [(1, 1)])


class Gate:
    """A mover that waits until it is opened."""

    def __init__(self) -> None:
        self.started, self.opened = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Pairs) -> None:
        self.started.set()
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        move_blocks(sources, destinations, pairs)


def test_transfers_run_beside_their_caller() -> None:
    gate, device, host = Gate(), random_pages(6), random_pages(6)
    saved, loaded = [page[2].clone() for page in device], [page[2].clone() for page in host]
    transfers = ThreadTransfers(device, host, gate)
    transfers.start([(2, 5)], [(2, 3)])
    assert gate.started.wait(60)
    assert transfers.is_reading([1, 2])
    assert not transfers.is_reading([1, 3, 5])
    gate.opened.set()
    transfers.wait()
    assert not transfers.is_reading([2])
    for page, old in zip(host, saved, strict=True):
        assert torch.equal(page[5], old)
    for page, old in zip(device, loaded, strict=True):
        assert torch.equal(page[3], old)


def test_blocks_are_saved_before_others_are_loaded_over_them() -> None:
    device, host = random_pages(4), random_pages(4)
    saved = [page[1].clone() for page in device]
    transfers = ThreadTransfers(device, host, move_blocks)
    transfers.start([(1, 2)], [(3, 1)])
    transfers.wait()
    for page, old, other in zip(host, saved, device, strict=True):
        assert torch.equal(page[2], old)
        assert torch.equal(other[1], page[3])


def test_what_goes_wrong_is_raised_where_it_is_waited_for() -> None:
    gate = Gate()
    gate.error = OSError("no")
    gate.opened.set()
    transfers = ThreadTransfers(random_pages(2), random_pages(2), gate)
    transfers.start([(1, 1)], [])
    with pytest.raises(OSError, match="no"):
        transfers.wait()
    transfers.wait()


def test_without_a_host_pool_a_plan_that_swaps_is_a_bug_that_shows() -> None:
    transfers = NoTransfers()
    transfers.start([], [])
    transfers.wait()
    assert not transfers.is_reading([1])
    for orders in (([(1, 1)], []), ([], [(1, 1)])):
        with pytest.raises(AssertionError):
            transfers.start(*orders)


# Plans through the executor: a hand-made life of two sequences with 4 tokens a block.

BLOCK = 4
MakeExecutor = Callable[..., LocalExecutor]


@pytest.fixture
def make_executor(model_path: Path, executors: list[LocalExecutor]) -> MakeExecutor:
    def make(**options: object) -> LocalExecutor:
        keywords = {"model": str(model_path), "num_threads": 1, "max_num_seqs": 4, "block_size": BLOCK, **options}
        executor = LocalExecutor(resolve(EngineOptions.from_keywords(keywords)))
        executors.append(executor)
        groups, layers_per_group = group_layers(executor.load_model(), BLOCK)
        executor.allocate(KVCacheLayout(BLOCK, 9, groups, layers_per_group, num_host_blocks=6))
        return executor

    return make


def row(seq_id: int, tokens: list[int], blocks: list[int]) -> NewSequence:
    return NewSequence(seq_id, tokens, 6, [blocks], GREEDY)


def plan(step: int, seqs: dict[int, tuple[int, int]], **columns: object) -> StepPlan:
    """seqs: sequence -> (start, tokens); all are sampled."""
    ids = list(seqs)
    starts, counts = [start for start, _ in seqs.values()], [count for _, count in seqs.values()]
    return StepPlan(step, ids, starts, counts, ids, list(range(len(ids))), **columns)


PROMPTS = {1: [5, 9, 2, 7, 11, 3], 2: [8, 8, 1, 30, 4, 60]}


def plain_run(executor: LocalExecutor) -> dict[int, list[int]]:
    """Three tokens of each, undisturbed."""
    rows = [row(1, PROMPTS[1], [1, 2, 3]), row(2, PROMPTS[2], [4, 5, 6])]
    results = [executor.execute(plan(0, {1: (0, 6), 2: (0, 6)}, new_sequences=rows)).result()]
    results += [executor.execute(plan(step, {1: (5 + step, 1), 2: (5 + step, 1)})).result() for step in (1, 2)]
    return {seq: [result.token_ids[index][0] for result in results] for index, seq in enumerate((1, 2))}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("direction", ["reused at once", "copied over at once"])
def test_a_block_that_is_handed_out_at_once_is_saved_first(
    make_executor: MakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    queue_depth: int,
    direction: str,
) -> None:
    """Sequence 2 is swapped out, its blocks go to sequence 1 in the same plan, and it returns to other blocks. The copy
    starts late: unless the model, or a block copy, waits for it, it saves what was written meanwhile."""
    expected = plain_run(make_executor(attention_backend=backend))
    mover = cpu_blocks.block_mover
    timers: list[threading.Timer] = []

    def late(*arguments: object) -> BlockMover:
        move = mover(*arguments)

        def run(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Pairs) -> None:
            late_start = threading.Event()
            timers.append(threading.Timer(0.1, late_start.set))
            timers[-1].start()
            assert late_start.wait(60)
            move(sources, destinations, pairs)

        return run

    monkeypatch.setattr("quire.worker.platform.cpu.block_mover", late)
    executor = make_executor(attention_backend=backend, queue_depth=queue_depth)
    found: dict[int, list[int]] = {1: [], 2: []}

    def run(step_plan: StepPlan) -> None:
        result = executor.execute(step_plan).result()
        for seq_id, (token,) in zip(step_plan.sample_seq_ids, result.token_ids, strict=True):
            found[seq_id].append(token)

    run(plan(0, {2: (0, 6)}, new_sequences=[row(2, PROMPTS[2], [4, 5])]))
    if direction == "reused at once":
        first = {"new_sequences": [row(1, PROMPTS[1], [5, 4, 3])]}
    else:
        # Nothing is in blocks 7 and 8: what they are copied over must have been saved.
        first = {"new_sequences": [row(1, PROMPTS[1], [1, 2, 3])], "block_copies": [(7, 4), (8, 5)]}
    run(plan(1, {1: (0, 6)}, released=[2], transfers=HostTransfers([(4, 6), (5, 2)]), **first))
    back = row(2, [*PROMPTS[2], *found[2]], [7, 8, 6])
    run(plan(2, {1: (6, 1)}, transfers=HostTransfers(swap_in=[(6, 7), (2, 8)]), new_sequences=[back]))
    run(plan(3, {1: (7, 1), 2: (6, 1)}))
    run(plan(4, {2: (7, 1)}))
    assert len(timers) == 2
    assert found == expected


def test_a_plan_may_hold_nothing_but_swaps(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    expected = plain_run(make_executor())[1]
    tokens = executor.execute(plan(0, {1: (0, 6)}, new_sequences=[row(1, PROMPTS[1], [1, 2])])).result().token_ids[0]
    result = executor.execute(plan(1, {}, released=[1], transfers=HostTransfers([(1, 4), (2, 3)]))).result()
    assert result.token_ids == []
    back = row(1, [*PROMPTS[1], *tokens], [2, 1])
    swaps = HostTransfers(swap_in=[(4, 2), (3, 1)])
    executor.execute(plan(2, {}, transfers=swaps, new_sequences=[back]))
    tokens += executor.execute(plan(3, {1: (6, 1)})).result().token_ids[0]
    assert tokens == expected[:2]


def test_a_failed_copy_fails_the_next_plan(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.execute(plan(0, {1: (0, 6)}, new_sequences=[row(1, PROMPTS[1], [1, 2])])).result()
    executor.execute(plan(1, {}, released=[1], transfers=HostTransfers([(1, 77)]))).result()
    with pytest.raises(ValueError, match="block 77"):
        executor.execute(plan(2, {}, transfers=HostTransfers(swap_in=[(4, 2)]))).result()


def test_costs_are_the_time_of_a_copy_and_of_a_prompt(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes one second at each look."""
    executor = make_executor()
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("quire.worker.preemption_costs.time", clock)
    costs = executor.measure_preemption_costs()
    assert costs.seconds_per_block == 1 / (2 * 6), "all blocks of the smaller pool, out and in"
    assert costs.seconds_per_token == 1 / TIMED_TOKENS
    assert clock.perf_counter() == 2 * 2 * NUM_REPEATS


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_connector_that_moves_layers_is_called_for_each_around_the_model(
    make_executor: MakeExecutor, queue_depth: int
) -> None:
    log: list[str] = []

    class LayerConnector(WorkerConnector):
        layers = (0, 1)

        def start_load(self, plan: StepPlan) -> None:
            log.append(f"load {plan.step_id}")

        def wait_layer(self, layer: int) -> None:
            log.append(f"wait {layer}")

        def save_layer(self, layer: int) -> None:
            log.append(f"save {layer}")

        def finished(self, plan: StepPlan) -> StoreReport:
            log.append(f"finished {plan.step_id}")
            return StoreReport(num_stored=plan.step_id)

        def close(self) -> None:
            log.append("close")

    executor = make_executor(queue_depth=queue_depth)
    worker = executor._worker
    assert worker is not None
    worker._connector = LayerConnector()
    launch = worker._runner.launch

    def logged(step_plan: StepPlan) -> object:
        log.append("model")
        return launch(step_plan)

    worker._runner.launch = logged
    result = executor.execute(plan(7, {1: (0, 6)}, new_sequences=[row(1, PROMPTS[1], [1, 2])])).result()
    assert result.transfers == StoreReport(num_stored=7)
    executor.shutdown()
    assert log == ["load 7", "wait 0", "wait 1", "model", "save 0", "save 1", "finished 7", "close"]


def test_orders_without_a_connector_are_a_bug_that_shows(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.execute(plan(0, {}, transfers=HostTransfers())).result()
    for step, orders in enumerate((StoreTransfers(), HostTransfers(awaits_report=True)), start=1):
        with pytest.raises(AssertionError, match="there is no KV connector"):
            NoWorkerConnector().begin_plan(plan(step, {}, transfers=orders))
