"""One replica: closed forms, determinism, conservation, and what the prefix cache finds."""

from __future__ import annotations

import gc
import math
import types
from collections.abc import Sized
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from quire.config.parallel import ParallelConfig
from quire.engine.core import EngineCore
from quire.errors import ConfigError, InsufficientMemoryError
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.memory import activation_bytes, kv_cache_bytes
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, Observer, Record, Replica, simulate
from quire.simulator.shape import find_shape
from quire.simulator.trace import TraceRequest
from quire.simulator.work import StepWork
from quire.simulator.workloads import Arrivals, stream
from tests.simulator.making import make_cost, records, settings
from tests.simulator.test_work import make_plan

HOST, EACH = 2e-4, 5e-5
HARDWARE = replace(find("a100-40g"), host_overhead=HOST, host_overhead_per_sequence=EACH)


def seconds(entries: list[tuple[int, int]], num_sampled: int, host: bool = True) -> float:
    """A step, by the cost model; with the host's overhead before it."""
    cost = make_cost(HARDWARE)
    work = StepWork.of(make_plan(entries))
    work.num_sampled = num_sampled
    return cost.step_seconds(work) + (HOST + len(entries) * EACH if host else 0.0)


def test_alone_a_request_takes_the_sum_of_its_steps() -> None:
    (record,) = records([TraceRequest(5.0, 600, 4)], make_cost(HARDWARE))
    prompt = seconds([(0, 256)], 0) + seconds([(256, 256)], 0) + seconds([(512, 88)], 1)
    tokens = [seconds([(start, 1)], 1) for start in (600, 601, 602)]
    assert record.ttft == pytest.approx(prompt)
    assert record.latency == pytest.approx(prompt + sum(tokens))
    assert record.tpot == pytest.approx(sum(tokens) / 3)
    assert record.normalized_latency == pytest.approx(record.latency / 4)
    assert (record.num_tokens, record.num_generated, record.num_cached, record.num_preemptions) == (4, 4, 0, 0)


def test_two_that_arrive_together_share_their_steps() -> None:
    first, second = records([TraceRequest(0.0, 40, 2), TraceRequest(0.0, 60, 3)], make_cost(HARDWARE))
    prompt, both = seconds([(0, 40), (0, 60)], 2), seconds([(40, 1), (60, 1)], 2)
    assert first.ttft == second.ttft == pytest.approx(prompt)
    assert first.latency == pytest.approx(prompt + both)
    assert second.latency == pytest.approx(prompt + both + seconds([(61, 1)], 1))


def test_who_arrives_during_a_step_waits_for_its_end() -> None:
    prompt = seconds([(0, 200)], 1)
    first, second = sorted(
        records([TraceRequest(0.0, 200, 1), TraceRequest(prompt / 2, 100, 1)], make_cost(HARDWARE)),
        key=lambda record: record.number,
    )
    assert first.latency == pytest.approx(prompt)
    assert second.ttft == pytest.approx(prompt / 2 + seconds([(0, 100)], 1))


def test_samples_of_one_prompt_share_it() -> None:
    (record,) = records([TraceRequest(0.0, 100, 3, n=4)], make_cost(HARDWARE))
    steps = [seconds([(0, 100)], 4), seconds([(100, 1)] * 4, 4), seconds([(101, 1)] * 4, 4)]
    copies = make_cost(HARDWARE)
    copied = StepWork.of(make_plan([(100, 1)] * 4))
    copied.num_copied_blocks = 3  # all but one write into a copy of the prompt's last block
    extra = copies.step_seconds(copied) - copies.step_seconds(StepWork.of(make_plan([(100, 1)] * 4)))
    assert record.latency == pytest.approx(sum(steps) + extra)
    assert record.num_generated == 12


def test_the_same_seed_gives_the_same_result() -> None:
    def run(seed: int) -> dict[str, object]:
        return simulate(stream("sharegpt", Arrivals(40.0, num_requests=40), seed), make_cost(), settings()).as_json()

    assert run(3) == run(3)
    assert run(3) != run(4)


REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        arrival=st.floats(0, 0.2),
        input_tokens=st.integers(1, 300),
        output_tokens=st.integers(1, 40),
        prefix_group=st.sampled_from(["a", "b", None]),
        prefix_tokens=st.integers(0, 300),
        n=st.integers(1, 3),
        priority=st.integers(-2, 2),
    ),
    min_size=1,
    max_size=14,
)


def with_valid_prefix(request: TraceRequest) -> TraceRequest:
    shared = 0 if request.prefix_group is None else min(request.prefix_tokens, request.input_tokens)
    return replace(request, prefix_tokens=shared)


@given(
    requests=REQUESTS,
    num_blocks=st.integers(22, 60),  # the longest sequence fits: none is cut short
    mode=st.sampled_from(["recompute", "swap", "auto"]),
    depth=st.integers(1, 2),
    window=st.sampled_from([None, 50]),
    beams=st.booleans(),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_everybody_finishes_or_is_refused_and_tokens_add_up(
    requests: list[TraceRequest], num_blocks: int, mode: str, depth: int, window: int | None, beams: bool
) -> None:
    requests = sorted(map(with_valid_prefix, requests), key=lambda request: request.arrival)
    if beams:
        requests = [replace(request, n=1, beam_width=request.n + 1) for request in requests]
    done: list[Record] = []
    refused: list[TraceRequest] = []
    options = settings(
        num_blocks_override=num_blocks,
        preemption_mode=mode,
        swap_space=10**6,
        queue_depth=depth,
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )
    windows = {} if window is None else {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}  # fmt: skip  # noqa: E501
    observer = Observer(on_record=done.append, on_refusal=lambda request, reason: refused.append(request))
    metrics = simulate(requests, make_cost(**windows), options, observer=observer)  # checks that all blocks are free
    assert sorted(id(record.request) for record in done) == sorted(
        id(request) for request in requests if not any(request is other for other in refused)
    )
    assert metrics.num_requests == len(requests) == metrics.num_finished + metrics.num_refused
    assert metrics.num_output_tokens == sum(r.request.output_tokens * r.request.num_sequences for r in done)
    assert metrics.num_output_tokens == metrics.stats.generation_tokens_total
    assert metrics.num_input_tokens == sum(record.request.input_tokens for record in done)
    for record in done:
        assert record.request.arrival < record.first_token <= record.finish <= metrics.end
        assert 0 <= record.num_cached < record.request.input_tokens
    assert metrics.latencies["ttft"].count == len(done)


def test_a_request_that_never_fits_is_refused_and_the_others_are_served() -> None:
    reasons: list[str] = []
    metrics = simulate(
        [TraceRequest(0.0, 5000, 10), TraceRequest(0.0, 20, 5), TraceRequest(0.0, 30, 5, n=17)],
        make_cost(),
        settings(num_blocks_override=200),
        observer=Observer(on_refusal=lambda request, reason: reasons.append(reason)),
    )
    assert (metrics.num_finished, metrics.num_refused) == (1, 2)
    assert "longest sequence, 3200" in reasons[0], "the pool, not the model's 4096"
    assert "n=17 exceeds the engine's max_num_seqs of 16" in reasons[1]


def test_an_output_ends_where_the_longest_sequence_does() -> None:
    (record,) = records([TraceRequest(0.0, 3190, 500)])
    assert record.num_tokens == 10


def test_requests_of_a_group_find_each_others_prefix_and_nothing_else() -> None:
    requests = [
        TraceRequest(0.0, 100, 4, "examples", 64),
        TraceRequest(1.0, 120, 4, "examples", 64),
        TraceRequest(2.0, 100, 4, "others", 64),
        TraceRequest(3.0, 100, 4),
        TraceRequest(4.0, 90, 4, "examples", 40),
    ]
    assert [record.num_cached for record in records(requests)] == [0, 64, 0, 0, 32]
    assert [record.num_cached for record in records(requests, options=settings(enable_prefix_caching=False))] == [0] * 5


def test_a_conversation_finds_its_earlier_turns_with_their_answers() -> None:
    turns = [TraceRequest(float(turn), 100 + 150 * turn, 80, "talk", 100 + 150 * turn) for turn in range(3)]
    # A turn leaves its prompt and all of its answer but the last token, whole blocks of 16: 179 and 329 tokens.
    assert [record.num_cached for record in records(turns)] == [0, 176, 320]


def test_swapped_and_recomputed_requests_generate_the_same_number_of_tokens() -> None:
    requests = [TraceRequest(0.0, 100, 200) for _ in range(6)]
    small = settings(num_blocks_override=60)
    recomputed = simulate(requests, make_cost(), small)
    swapped = simulate(requests, make_cost(), replace(small, preemption_mode="swap", swap_space=10**9))
    assert recomputed.stats.preemptions_total > 0 == recomputed.stats.swap_preemptions_total
    assert swapped.stats.swap_preemptions_total > 0 == swapped.stats.recomputed_tokens_total
    assert recomputed.num_output_tokens == swapped.num_output_tokens == 1200


def test_what_is_kept_of_a_run_agrees_with_what_happened() -> None:
    steps: list[tuple[int, int, int, float]] = []
    done: list[Record] = []

    def look(core: EngineCore, took: float) -> None:
        stats = core.stats()
        steps.append((stats.num_running, stats.num_waiting, stats.num_used_blocks, took))

    metrics = simulate(
        stream("alpaca", Arrivals(2000.0, num_requests=60)),
        make_cost(),
        settings(),
        objectives={"ttft": 0.06, "latency": 0.09},
        observer=Observer(on_step=look, on_record=done.append),
    )
    total = sum(took for *_, took in steps)
    assert metrics.step_seconds == pytest.approx(total)
    assert metrics.mean_running == pytest.approx(sum(running * took for running, *_, took in steps) / total)
    assert metrics.mean_kv_usage == pytest.approx(sum(used * took for *_, used, took in steps) / total / 200)
    waited = sum(waiting * took for _, waiting, _, took in steps)
    assert waited > 0
    assert sum(row["waiting"] for row in metrics.series.rows(200)) * metrics.series.width == pytest.approx(waited)
    good = [record for record in done if record.ttft <= 0.06 and record.latency <= 0.09]
    early = [record for record in done if record.ttft <= 0.06]
    late = [record for record in done if record.latency <= 0.09]
    assert metrics.num_slo_met == len(good) < min(len(early), len(late))
    rows = metrics.series.rows(metrics.num_blocks)
    assert sum(row["output_tokens_per_second"] for row in rows) * metrics.series.width == metrics.num_output_tokens
    assert sum(row["preemptions"] for row in rows) == metrics.stats.preemptions_total
    assert 0 < metrics.busy_seconds < metrics.step_seconds


def test_a_model_that_does_not_fit_says_so() -> None:
    hardware = replace(HARDWARE, memory=1e6)
    with pytest.raises(InsufficientMemoryError, match=r"tiny does not fit .* the weights take"):
        simulate([TraceRequest(0.0, 10, 1)], make_cost(hardware), EngineSettings())


@pytest.mark.parametrize(
    ("name", "tp", "row"),
    [
        ("llama-3-8b", 1, 3 * 4096 + 3 * 14336),
        ("llama-3-8b", 2, 3 * 4096 + 3 * 14336 / 2),
        ("mixtral-8x7b", 1, 3 * 4096 + 3 * 2 * 14336),  # two experts for each token
        ("gemma-3-27b", 1, 3 * 5376 + 3 * 21504),
        ("qwen3-30b-a3b", 1, 3 * 2048 + 3 * 8 * 768),
    ],
)
def test_what_a_step_keeps_at_once(name: str, tp: int, row: float) -> None:
    """The residual stream three times and the wider of attention and MLP, 16 bits each, and three copies of logits."""
    shape = find_shape(name)
    cost = CostModel(shape, find("h100"), ParallelConfig(tp=tp))
    assert activation_bytes(cost, 8192, 256) == int(2 * 8192 * row + 3 * 256 * shape.vocab * 4)


def test_the_share_of_memory_is_of_all_of_it() -> None:
    """Weights and activations count against the share, as they do on a GPU."""
    cost = CostModel(find_shape("llama-3-8b"), find("h100"))
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    used = cost.weight_bytes_per_device + activation_bytes(cost, 8192, 256)
    assert kv_cache_bytes(cost, utilization=0.5, **limits) == pytest.approx(0.5 * 80e9 - used, abs=2)
    assert kv_cache_bytes(cost, utilization=0.9, **limits) == pytest.approx(0.9 * 80e9 - used, abs=2)


@pytest.mark.parametrize("changes", [{"kv_cache_memory": 900_000_000}, {"num_blocks_override": 27_500}])
def test_a_pool_that_is_given_must_fit_beside_the_weights(changes: dict[str, int]) -> None:
    """A block has 32 KiB: 4 layers, keys and values, 4 heads of 32 elements of 2 bytes, 16 tokens."""
    settings = replace(EngineSettings(), **changes)
    with pytest.raises(InsufficientMemoryError, match=r"the weights take .* MiB and the KV cache"):
        settings.config(make_cost(replace(HARDWARE, memory=0.9e9)))
    assert settings.config(make_cost(replace(HARDWARE, memory=0.93e9))).cache.memory_utilization == 0.9


def test_a_sequence_is_no_longer_than_the_model_allows() -> None:
    assert EngineSettings(max_model_len=4096).config(make_cost()).model.max_model_len == 4096
    with pytest.raises(ConfigError, match=r"max_model_len \(4097\) exceeds the 4096 positions of tiny"):
        EngineSettings(max_model_len=4097).config(make_cost())


def test_the_pool_is_what_the_device_leaves() -> None:
    cost = make_cost(replace(HARDWARE, memory=1e9))
    options = EngineSettings(max_num_seqs=64, max_num_batched_tokens=64, gpu_memory_utilization=0.5)
    replica = Replica(cost, options)
    token = 4 * 2 * 4 * 32 * 2
    left = 0.5e9 - cost.weight_bytes_per_device
    assert replica.core.ready.num_blocks == pytest.approx(left / (16 * token), rel=0.01)
    # But no more than what four sequences of 4,096 tokens can use.
    assert Replica(cost, replace(options, max_num_seqs=4)).core.ready.num_blocks == 4 * 4096 // 16


def test_an_idle_clock_stands_where_it_was_told() -> None:
    replica = Replica(make_cost(), settings())
    replica.advance(7.5)
    assert replica.clock.now() == 7.5
    replica.offer(TraceRequest(7.0, 10, 2))
    replica.advance(math.inf)
    result = replica.finish_run()
    assert isinstance(result, Metrics)
    assert result.end > 7.5


def _size(root: object) -> int:
    """Entries of all containers that an object reaches, each counted once. Code is left out."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, type | types.ModuleType | types.FunctionType):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return sum(len(each) for each in seen.values() if isinstance(each, Sized) and not isinstance(each, str | bytes))


@pytest.mark.long
def test_nothing_is_kept_of_requests_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the pool is full of cached blocks and the results have as many entries as they ever get, there is no more to
    be kept of four times as many requests."""
    monkeypatch.setattr("quire.simulator.metrics.EXACT", 100)
    monkeypatch.setattr("quire.simulator.metrics.BIN_WIDTH", 1.0)
    monkeypatch.setattr("quire.simulator.metrics.NUM_BINS", 16)
    sizes = []
    for count in (300, 1200):
        replica = Replica(make_cost(), settings(num_blocks_override=120, queue_depth=2))
        replica.serve_trace(stream("sharegpt", Arrivals(20.0, num_requests=count)))
        assert replica.metrics.stats.num_cached_blocks > 100
        sizes.append(_size(replica))
    assert sizes[1] < sizes[0] + 50, sizes


def test_first_come_first_served_ignores_priorities_and_says_so() -> None:
    """A trace that brings some can be replayed with both policies."""
    trace = [TraceRequest(0.0, 200, 40), TraceRequest(0.0, 200, 40), TraceRequest(0.0, 200, 40, priority=-100)]
    plain = [replace(request, priority=0) for request in trace]

    def ends(requests: list[TraceRequest], policy: str) -> list[int]:
        options = settings(max_num_seqs=1, scheduling_policy=policy)
        return [record.number for record in records(requests, options=options)]

    assert ends(trace, "fcfs") == ends(plain, "fcfs") == ends(plain, "priority") == [0, 1, 2]
    assert ends(trace, "priority") == [2, 0, 1]
    for policy, num_ignored in (("fcfs", 1), ("priority", 0)):
        metrics = simulate(trace, make_cost(), settings(scheduling_policy=policy))
        assert metrics.num_priorities_ignored == metrics.as_json()["num_priorities_ignored"] == num_ignored
