"""Calibration: what a cost model with known numbers took is turned back into those numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from quire.cli.calibrate import fit_profile as fit_log
from quire.cli.calibrate import main
from quire.cli.main import main as quire
from quire.clock import VirtualClock
from quire.config.model_shape import ModelShape
from quire.engine.step_log import StepLog, StepLogHeader, StepRecord, read_step_log
from quire.errors import UserError
from quire.simulator.calibration import MIN_STEPS, Fit, calibrate, plan_of, samples_of, work_of
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import Factors, Hardware, find, read_profile
from quire.simulator.shape import find_shape
from quire.simulator.work import StepWork
from quire.step import StepPlan
from tests.fakes.core import CoreClient, make_config
from tests.fakes.executor import FakeExecutor
from tests.fakes.transfers import copies
from tests.simulator.making import with_attention

BASE = find("cpu-2-core-avx512")
TRUE = replace(
    BASE,
    factors=Factors(compute=0.55, bandwidth=0.6, attention_compute=0.2, attention_bandwidth=0.3),
    half_rows=6.0,
    launch_overhead=4e-6,
    token_overhead=8e-6,
    sequence_overhead=5e-5,
    new_sequence_overhead=2e-2,
    host_overhead=4e-4,
    host_overhead_per_sequence=2e-5,
    host_overhead_per_new_sequence=3e-4,
)
SHAPE = replace(find_shape("opt-125m"), dtype="bfloat16", expert_dtype="bfloat16")


def logged(num_steps: int, seconds: Callable[[StepWork], float], *, seed: int = 0) -> list[StepRecord]:
    """Steps of all kinds: one to 32 sequences that decode, and now and then a chunk of a prompt or two."""
    rng = random.Random(seed)
    records = []
    for step in range(num_steps):
        count = rng.choice((1, 2, 3, 6, 12, 24, 32))
        starts, tokens = [rng.randrange(1, 1900) for _ in range(count)], [1] * count
        if rng.random() < 0.3:
            for _ in range(rng.choice((1, 1, 3))):
                starts.append(rng.choice((0, 0, 512)))
                tokens.append(rng.randrange(2, 700))
        record = StepRecord(
            step=step,
            at=0.0,
            seconds=0.0,
            gap=4e-4 + 2e-5 * len(starts) + 3e-4 * (len(starts) - count),
            starts=starts,
            tokens=tokens,
            num_sampled=len(starts),
            num_carried=count,
        )
        record.seconds = seconds(work_of(record, (None,)))
        records.append(record)
    return records


def fitted(records: list[StepRecord], base: Hardware = BASE) -> Fit:
    return calibrate(SHAPE, base, Precision.of(SHAPE), samples_of(records, (None,)))


def true_cost() -> CostModel:
    return CostModel(SHAPE, TRUE, precision=Precision.of(SHAPE))


def test_numbers_come_back() -> None:
    fit = fitted(logged(700, true_cost().step_seconds))
    found, factors = fit.hardware, fit.hardware.factors
    assert fit.all_steps.median < 0.01
    assert fit.all_steps.p95 < 0.03
    assert abs(fit.all_steps.total) < 0.005
    assert fit.decode_steps is not None
    assert fit.other_steps is not None
    assert fit.decode_steps.count + fit.other_steps.count == fit.all_steps.count == fit.num_logged
    for name, tolerance in (("compute", 0.06), ("bandwidth", 0.1), ("attention_bandwidth", 0.06)):
        assert getattr(factors, name) == pytest.approx(getattr(TRUE.factors, name), rel=tolerance), name
    assert found.new_sequence_overhead == pytest.approx(2e-2, rel=0.1)
    assert found.host_overhead == pytest.approx(4e-4, rel=0.01)
    assert found.host_overhead_per_sequence == pytest.approx(2e-5, rel=0.02)
    assert found.host_overhead_per_new_sequence == pytest.approx(3e-4, rel=0.02)


def test_disturbed_steps_do_not_count() -> None:
    """Of the steps of few sequences one in three takes up to five times as long, and every step has three percent of
    noise: what few sequences cost must not come out longer for that than what many do."""
    rng, cost = random.Random(1), true_cost()

    def seconds(work: StepWork) -> float:
        disturbed = rng.uniform(2, 5) if work.num_sequences <= 3 and rng.random() < 1 / 3 else 1.0
        return cost.step_seconds(work) * rng.gauss(1, 0.03) * disturbed

    noisy = fitted(logged(900, seconds))
    predicted = CostModel(SHAPE, noisy.hardware, precision=Precision.of(SHAPE))

    def ratio(num_sequences: int) -> float:
        work = StepWork.of(StepPlan(0, [0] * num_sequences, [900] * num_sequences, [1] * num_sequences, [], []))
        return predicted.step_seconds(work) / cost.step_seconds(work)

    assert ratio(2) / ratio(24) == pytest.approx(1, abs=0.1)
    assert abs(noisy.all_steps.total) < 0.1


def test_what_the_log_does_not_tell_stays() -> None:
    """Single tokens at short contexts say nothing of the arithmetic of attention."""
    cost = true_cost()
    records = [each for each in logged(500, cost.step_seconds) if max(each.tokens) == 1]
    fit = fitted(records)
    assert "attention_compute" not in fit.told
    assert fit.hardware.factors.attention_compute == pytest.approx(BASE.factors.attention_compute, rel=0.05)
    assert {"attention_bandwidth", "sequence_overhead"} & fit.told
    assert fit.other_steps is None


def test_numbers_stay_within_their_bounds() -> None:
    """A device that is faster than its profile says: the fit ends at the limits."""
    fast = replace(TRUE, peaks={name: 2 * peak for name, peak in TRUE.peaks.items()}).with_factors(compute=0.9)
    cost = CostModel(SHAPE, fast, precision=Precision.of(SHAPE))
    assert fitted(logged(200, cost.step_seconds)).hardware.factors.compute == pytest.approx(1.0)


def test_where_no_step_waits_for_the_host_its_overhead_stays() -> None:
    records = logged(100, true_cost().step_seconds)
    for record in records:
        record.gap = 0.0
    assert fitted(records).hardware.host_overhead == BASE.host_overhead


def test_idle_time_is_no_overhead() -> None:
    records = logged(300, true_cost().step_seconds)
    for record in records[::4]:
        record.num_carried, record.gap = 0, 10.0
        record.seconds = 0.03 + true_cost().step_seconds(work_of(record, (None,)))
    fit = fitted(records)
    assert fit.hardware.host_overhead == pytest.approx(4e-4, rel=0.02)
    assert fit.hardware.wake_overhead == pytest.approx(0.03, rel=0.1)
    assert fit.all_steps.p95 < 0.06


def test_too_few_steps() -> None:
    with pytest.raises(UserError, match=f"needs {MIN_STEPS} steps, and the log has 7"):
        fitted(logged(10, true_cost().step_seconds))


def test_steps_that_move_blocks_are_left_out() -> None:
    records = logged(40, true_cost().step_seconds)
    records[10].num_swapped_out = records[20].num_swapped_in = 3
    assert len(samples_of(records, (None,))) == 40 - 3 - 4


def test_a_logged_step_costs_what_its_plan_did(tmp_path: Path) -> None:
    config, path = make_config(num_blocks=14, num_host_blocks=8, preemption_mode="swap"), tmp_path / "log"
    executor = FakeExecutor(windows=config.model.sliding_windows, record=True)
    client = CoreClient(config, executor, observers=[StepLog(config, path, VirtualClock())])
    for number in range(6):
        client.add(f"request-{number}", list(range(3 + 5 * number)), n=1 + number % 3, max_tokens=9)
    client.run()
    client.core.shutdown()

    def counted(plan: StepPlan) -> StepWork:
        return msgspec.structs.replace(StepWork.of(plan, (None, 7)), waits_for_swap=False, num_new=0)

    _, records = read_step_log(path)
    assert [counted(plan_of(record)) for record in records] == [counted(plan) for plan in executor.plans]
    assert any(copies(plan).swap_out for plan in executor.plans)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of OPT-125M, by the true numbers."""
    header = StepLogHeader(
        version=1,
        model="opt-125m",
        architecture="OPTForCausalLM",
        weights="bfloat16",
        kv_cache_dtype="bfloat16",
        vocab_size=50272,
        hidden_size=768,
        num_layers=12,
        block_size=16,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        queue_depth=1,
        num_threads=2,
        backend="made up",
    )
    path = tmp_path / "steps.jsonl"
    lines = [header, *logged(200, true_cost().step_seconds)]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_the_command_writes_a_profile_that_predicts(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = log.with_name("here.json")
    assert main([str(log), "--profile", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "197 steps" in printed
    assert "median error" in printed
    hardware = find(str(out))
    assert hardware == read_profile(out)
    assert hardware.name == "here"
    assert "197 steps of opt-125m" in hardware.source
    cost = CostModel(SHAPE, hardware, precision=Precision.of(SHAPE))
    for record in logged(20, true_cost().step_seconds, seed=5):
        assert cost.step_seconds(work_of(record, (None,))) == pytest.approx(record.seconds, rel=0.05)


def test_the_command_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire(["simulate", "calibrate", str(log), str(log), "--model", "opt-125m", "--name", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["errors"]["all"]["median"] < 0.02
    assert found["num_steps"] == 397
    assert list(found["profile"]) == ["mine"]
    assert "compute" in found["determined"]


def test_logs_of_other_models_are_refused(log: Path) -> None:
    with pytest.raises(UserError, match="the log is of 'opt-125m' with 12 layers"):
        main([str(log), "--model", "opt-13b"])
    other = log.with_name("other.jsonl")
    other.write_bytes(log.read_bytes().replace(b"made up", b"another"))
    with pytest.raises(UserError, match="another run: backend"):
        main([str(log), str(other)])
    with pytest.raises(UserError, match="cannot write"):
        main([str(log), "--profile", str(log.parent / "absent" / "x.json")])
    with pytest.raises(UserError, match="--profile must name a file"):
        main([str(log), "--profile", "profile"])


def test_a_failed_calibration_leaves_no_profile(log: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.json"
    with pytest.raises(UserError):
        main([str(log), "--model", "opt-13b", "--profile", str(profile)])
    assert not profile.exists()
    profile.write_text("kept")
    with pytest.raises(UserError):
        main([str(log), "--model", "opt-13b", "--profile", str(profile)])
    assert profile.read_text() == "kept"


def test_windows_are_those_of_the_model(log: Path) -> None:
    """A log holds plans, so that one of a model with windows is counted with them."""
    header, records = read_step_log(log)
    shape: ModelShape = with_attention(SHAPE, (None, 64))
    assert fit_log(shape, BASE, header, records).num_logged == 197
