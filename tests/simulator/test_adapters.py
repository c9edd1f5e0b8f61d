"""Adapters in simulations: the loads of a real engine for the same arrivals, and what they cost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from quire.adapter_orders import AdapterRef
from quire.cli import simulate as command
from quire.clock import SystemClock
from quire.config.adapter_files import open_adapter
from quire.config.adapters import AdaptersConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.errors import InsufficientMemoryError, UserError
from quire.executors.local import LocalExecutor
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.adapters import by_zipf
from quire.simulator.replica import EngineSettings, Observer, Record, Replica, simulate
from quire.simulator.trace import TraceRequest, read_trace, write_trace
from tests.fakes.adapters import write_adapter
from tests.models.families import qwen3
from tests.models.harness import randomize, save
from tests.simulator.making import make_cost

SLOTS, ADAPTERS = 4, 12
ON = AdaptersConfig(max_running=SLOTS, max_rank=8, num_slots=SLOTS)
GAP = 1000.0
Wave = list[int | None]
"""Adapters of requests that come at once."""


def waves() -> list[Wave]:
    """Of no more adapters than there are slots, so that no load waits for another request's end."""
    rng = random.Random(5)
    weights = [1 / rank for rank in range(1, ADAPTERS + 1)]
    drawn = [rng.choices(range(ADAPTERS), weights, k=rng.randint(1, SLOTS)) for _ in range(30)]
    return [[*each, None] if len(each) == 2 else list(each) for each in drawn]


def loads_of_engine(directory: Path, refs: list[AdapterRef]) -> list[int]:
    """Loads of a real engine so far, after each wave."""
    options = {"model": str(directory), "enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 8, "num_threads": 1}
    config = resolve(EngineOptions.from_keywords({**options, "num_blocks_override": 40, "skip_tokenizer_init": True}))
    core = EngineCore(config, LocalExecutor(config), SystemClock())
    found = []
    for wave_number, wave in enumerate(waves()):
        for number, chosen in enumerate(wave):
            adapter = None if chosen is None else refs[chosen]
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            name = f"{wave_number} {number}"
            core.handle(
                AddRequest(
                    EngineRequest(
                        request_id=name,
                        prompt_token_ids=[5, 6, 7 + number],
                        params=params,
                        max_tokens=3,
                        seed=0,
                        adapter=adapter,
                    )
                )
            )
        while core.has_work:
            assert core.step().rejections == []
        found.append(core.stats().adapter_loads_total)
    core.shutdown()
    return found


def test_the_loads_of_an_engine(tmp_path: Path) -> None:
    model = randomize(qwen3())
    directory = save(model, tmp_path / "model")
    refs = []
    for number in range(ADAPTERS):
        path = write_adapter(model, tmp_path / str(number), seed=number, targets=lambda name: name.endswith("q_proj"))
        refs.append(msgspec.structs.replace(open_adapter(str(path), ON), name=str(number)))
    expected = loads_of_engine(directory, refs)
    replica = Replica(make_cost(), EngineSettings(adapters=ON, adapter_load_seconds=0.02))
    found, num_requests = [], 0
    for number, wave in enumerate(waves()):
        replica.advance(number * GAP)
        for chosen in wave:
            name = None if chosen is None else str(chosen)
            replica.offer(TraceRequest(number * GAP, 3, 3, adapter=name))
            num_requests += chosen is not None
        replica.advance((number + 1) * GAP - 1)
        found.append(replica.core.stats().adapter_loads_total)
    metrics = replica.finish_run()
    assert found == expected
    assert metrics.adapter_hit_rate == 1 - expected[-1] / num_requests
    assert 0.3 < metrics.adapter_hit_rate < 0.9, "there are hits and misses"


def spaced(*adapters: str | None) -> list[TraceRequest]:
    return [TraceRequest(GAP * number, 10, 5, adapter=adapter) for number, adapter in enumerate(adapters)]


def records_of(requests: list[TraceRequest], settings: EngineSettings) -> list[Record]:
    """In the order of arrival."""
    found: list[Record] = []
    simulate(requests, make_cost(), settings, observer=Observer(found.append))
    return sorted(found, key=lambda record: record.number)


def at_once(names: str, output_tokens: int = 50) -> list[TraceRequest]:
    return [TraceRequest(0.0, 10, output_tokens, adapter=None if name == "-" else name) for name in names]


def test_a_load_is_waited_for() -> None:
    few = replace(ON, max_running=1, num_slots=2)
    settings = EngineSettings(adapters=few, adapter_load_seconds=0.5)
    found = records_of(spaced("a", "a", "b", "c", "a", None), settings)
    assert [record.is_loaded for record in found] == [False, True, False, False, False, True]
    assert [record.ttft > 0.5 for record in found] == [not record.is_loaded for record in found]
    metrics = simulate(spaced("a", "a", "b"), make_cost(), settings)
    assert metrics.latencies["loading_ttft"].count == 2
    assert metrics.as_json()["adapter_loads"] == 2


def test_loads_follow_one_another_beside_other_requests() -> None:
    settings = EngineSettings(adapters=ON, adapter_load_seconds=0.5)
    first, second, third, without = records_of(at_once("abc-", 5), settings)
    assert without.finish < 0.5 < first.first_token < 1.0 < second.first_token < 1.5 < third.first_token < 2.0


def test_one_adapter_runs_at_a_time() -> None:
    """With one of `max_loras`, and slots for both."""
    settings = EngineSettings(adapters=replace(ON, max_running=1), adapter_load_seconds=0.001)
    first, second = records_of(at_once("ab"), settings)
    assert second.first_token > first.finish


def test_adapters_cost_a_step_their_bytes() -> None:
    def seconds(names: str, adapters: AdaptersConfig = ON) -> float:
        settings = EngineSettings(adapters=adapters, adapter_load_seconds=1e-9)
        return max(record.finish for record in records_of(at_once(names), settings))

    assert seconds("aaaa") < seconds("aabb") < seconds("abcd") < seconds("abcd", replace(ON, max_rank=64))


def test_slots_take_memory() -> None:
    def blocks(adapters: AdaptersConfig) -> int:
        settings = EngineSettings(adapters=adapters, gpu_memory_utilization=0.05, max_num_seqs=2048)
        return Replica(make_cost(), settings).core.ready.num_blocks

    assert blocks(replace(ON, num_slots=64)) < blocks(ON) < blocks(AdaptersConfig())
    with pytest.raises(InsufficientMemoryError, match=r"adapters .* and activations"):
        blocks(replace(ON, max_rank=512, num_slots=2000))


def test_shares_by_zipf() -> None:
    requests = [TraceRequest(0.0, 1, 1)] * 20_000
    drawn = [each.adapter for each in by_zipf(requests, 1000, 1.0, 0)]
    counts = Counter(drawn)
    assert counts["adapter 0"] == pytest.approx(10 * counts["adapter 9"], rel=0.2)
    assert drawn == [each.adapter for each in by_zipf(requests, 1000, 1.0, 0)]
    even = Counter(each.adapter for each in by_zipf(requests, 4, 0.0, 0))
    assert min(even.values()) > 4_500


def test_a_column_of_a_trace(tmp_path: Path) -> None:
    requests = spaced("a", None, "7")
    write_trace(tmp_path / "trace.jsonl", requests)
    assert list(read_trace(tmp_path / "trace.jsonl")) == requests
    (tmp_path / "trace.csv").write_text("arrival,input_tokens,output_tokens,adapter\n0,10,5,a\n1,10,5,\n")
    assert [each.adapter for each in read_trace(tmp_path / "trace.csv")] == ["a", None]
    (tmp_path / "bad.jsonl").write_text('{"arrival": 0, "input_tokens": 1, "output_tokens": 1, "adapter": [1]}')
    with pytest.raises(UserError, match="adapter must be a name"):
        list(read_trace(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match="adapters need --enable-lora"):
        simulate(requests, make_cost())


COMMAND = ["--workload", "alpaca", "--rate", "20", "--num-requests", "40", "--model", "qwen3-0.6b"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = ["--enable-lora", "--adapters", "1000", "--adapter-load", "80ms", "--max-loras", "8"]
    assert command.main([*COMMAND, *adapters]) == 0
    printed = capsys.readouterr().out
    assert "loads for 40 requests" in printed
    assert "its adapter was in no slot" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapters", "5"], "--adapters needs --enable-lora"),
        (["--enable-lora", "--adapters", "-1"], "at least 0"),
        (["--enable-lora", "--adapter-load", "5"], "--adapter-load '5': expected a time"),
        (["--enable-lora", "--pp", "2"], "not possible with --pp or --sweep"),
    ],
)
def test_refused_flags(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main([*COMMAND, *flags])
