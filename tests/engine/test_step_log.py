"""The step log: a line for each plan with what it computed and how long that took."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.clock import VirtualClock
from quire.engine.step_log import StepLog, StepRecord, read_step_log
from quire.errors import ConfigError, UserError
from quire.step import HostTransfers, StepPlan, StepResult
from tests.fakes.core import CoreClient, make_config
from tests.fakes.executor import FakeExecutor


def record(line: bytes) -> StepRecord:
    return msgspec.json.decode(line, type=StepRecord)


class LateExecutor(FakeExecutor):
    """Plans end when the test says so, as on a thread of their own."""

    def __init__(self) -> None:
        super().__init__(verify=False)
        self.pending: list[Future[StepResult]] = []

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.pending.append(Future())
        return self.pending[-1]

    def end(self) -> None:
        self.pending.pop(0).set_result(StepResult(0, []))


def plan(step: int, **columns: Any) -> StepPlan:
    defaults = {"seq_ids": [1], "start_positions": [0], "num_tokens": [3], "sample_seq_ids": [1], "sample_from": [0]}
    return StepPlan(step_id=step, **{**defaults, **columns})


def execute(log: StepLog, executor: LateExecutor, plan: StepPlan) -> Future[StepResult]:
    """Run a plan, observed, as the core does."""
    end = log.executes(plan)
    future = executor.execute(plan)
    future.add_done_callback(end)
    return future


def test_every_plan_of_a_core_is_logged(tmp_path: Path) -> None:
    config, path = make_config(num_blocks=12), tmp_path / "steps.jsonl"
    executor = FakeExecutor(windows=config.model.sliding_windows, record=True)
    client = CoreClient(config, executor, observers=[StepLog(config, path, VirtualClock())])
    for number in range(6):  # more than the blocks hold at once: some are preempted and begin again
        client.add(f"request-{number}", list(range(3 + 5 * number)), n=1 + number % 3, max_tokens=9)
    client.run()
    client.core.shutdown()
    assert client.core.stats().preemptions_total > 0
    header, records = read_step_log(path)
    assert (header.block_size, header.num_blocks, header.num_layers) == (4, 12, 2)
    assert header.backend == "fake executor"
    assert [each.step for each in records] == [each.step_id for each in executor.plans]
    rows: set[int] = set()
    for line, each in zip(records, executor.plans, strict=True):
        rows -= set(each.released)
        assert line.num_carried == len(rows.intersection(each.seq_ids))
        rows |= {new.seq_id for new in each.new_sequences} | {fork.child for fork in each.forks}
        assert (line.starts, line.tokens) == (each.start_positions, each.num_tokens)
        assert (line.num_sampled, line.num_copies) == (len(each.sample_seq_ids), len(each.block_copies))
    assert sum(each.num_copies for each in records) > 0


def test_steps_one_after_the_other(tmp_path: Path) -> None:
    """The gap is what passes between a step's end and the next plan."""
    clock, executor = VirtualClock(100.0), LateExecutor()
    log = StepLog(make_config(), tmp_path / "log", clock)
    for step in (1, 2):
        future = execute(log, executor, plan(step, transfers=HostTransfers([(1, 1), (2, 2)], [(3, 3)])))
        clock.advance(0.5)
        executor.end()
        assert future.done()
        clock.advance(0.125)
    log.ends()
    records = [record(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [(each.at, each.seconds, each.gap) for each in records] == [(0.0, 0.5, 0.0), (0.625, 0.5, 0.125)]
    assert (records[0].num_swapped_out, records[0].num_swapped_in) == (2, 1)


def test_overlapping_steps_are_timed_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    clock, executor = VirtualClock(), LateExecutor()
    log = StepLog(make_config(), tmp_path / "log", clock)
    execute(log, executor, plan(1))
    clock.advance(0.25)
    execute(log, executor, plan(2))  # waits for the first
    clock.advance(0.25)
    executor.end()
    clock.advance(0.75)
    executor.end()
    log.ends()
    records = [record(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert [(each.at, each.seconds, each.gap) for each in records] == [(0.0, 0.5, 0.0), (0.25, 0.75, 0.0)]


def test_a_failed_step_is_not_logged_and_its_error_goes_on(tmp_path: Path) -> None:
    config = make_config()
    client = CoreClient(
        config, FakeExecutor(fail_at_step=2), observers=[StepLog(config, tmp_path / "log", VirtualClock())]
    )
    client.add("request", [1, 2, 3])
    with pytest.raises(RuntimeError, match="injected"):
        client.run()
    client.core.shutdown()
    assert len(read_step_log(tmp_path / "log")[1]) == 2


def test_the_log_is_in_the_file_soon(tmp_path: Path) -> None:
    """Buffered, but not for longer than a second of steps."""
    clock, executor = VirtualClock(), LateExecutor()
    log = StepLog(make_config(), tmp_path / "log", clock)
    sizes = []
    for step in range(5):
        execute(log, executor, plan(step))
        clock.advance(0.4)
        executor.end()
        sizes.append((tmp_path / "log").read_bytes().count(b"\n"))
    assert sizes == [1, 1, 1, 4, 4]
    log.ends()
    assert (tmp_path / "log").read_bytes().count(b"\n") == 5


def test_a_full_disk_ends_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    client = CoreClient(config, FakeExecutor(), observers=[StepLog(config, Path("/dev/full"), VirtualClock())])
    client.add("request", [1, 2, 3])
    with caplog.at_level(logging.WARNING):
        client.run()
    client.core.shutdown()
    assert [record.message for record in caplog.records if "step log" in record.message] == [
        "the step log ends here: No space left on device"
    ]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the step log") as caught:
        StepLog(make_config(), tmp_path, VirtualClock())
    assert caught.value.param == "step_log"


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_option_of_an_engine(tmp_path: Path, queue_depth: int) -> None:
    path = tmp_path / "steps.jsonl"
    sizes: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(step_log=path, queue_depth=queue_depth, enable_prefix_caching=False, **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        llm.generate([{"prompt_token_ids": list(range(5, 25))}], params, use_tqdm=False)
        steps = llm.stats()["steps_total"]
    header, records = read_step_log(path)
    assert json.loads(path.read_text().splitlines()[0])["model"] == header.model == "bundled"
    assert (header.queue_depth, header.max_num_batched_tokens) == (queue_depth, 16)
    assert "kernels" in header.backend
    assert len(records) == steps
    assert [(each.starts, each.tokens) for each in records][:3] == [([0], [16]), ([16], [4]), ([20], [1])]
    assert all(each.seconds > 0 and each.gap >= 0 for each in records)


def test_a_log_that_was_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    config = make_config()
    client = CoreClient(config, FakeExecutor(), observers=[StepLog(config, path, VirtualClock())])
    client.add("request", [1, 2, 3], max_tokens=4)
    client.run()
    client.core.shutdown()
    whole = path.read_bytes()
    header, records = read_step_log(path)
    assert len(records) == 4
    path.write_bytes(whole[:-5])
    assert read_step_log(path) == (header, records[:-1])
    path.write_bytes(whole.replace(b'"tokens"', b'"token"', 1))
    with pytest.raises(UserError, match="line 2, is not of a step log"):
        read_step_log(path)
    path.write_bytes(whole.replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(UserError, match="version 2"):
        read_step_log(path)
    for content in (b"", b"\n", b"no json\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="line 1, is not of a step log"):
            read_step_log(path)
