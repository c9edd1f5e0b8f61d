"""The cost of each operator: against sums by hand, and how it moves with layouts, experts and precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.model_shape import ModelShape
from quire.config.parallel import ParallelConfig
from quire.errors import UserError
from quire.simulator.cost import (
    KERNELS_PER_LAYER,
    KERNELS_PER_STEP,
    LOGIT_BYTES,
    LOGIT_PASSES,
    ROW_PASSES,
    CostModel,
    Precision,
)
from quire.simulator.hardware import Factors, Hardware, find, from_json, profiles, to_json
from quire.simulator.shape import find_shape
from quire.simulator.work import ChunkTokens, StepWork
from quire.step import StepPlan
from tests.simulator.making import with_attention

GPU = replace(find("h100"), half_rows=3.0, token_overhead=2e-7, sequence_overhead=5e-7, new_sequence_overhead=1e-6)
CASES = [
    ("opt-13b", ParallelConfig()),
    ("llama-3-70b", ParallelConfig(tp=4)),
    ("llama-3-70b", ParallelConfig(tp=2, pp=4)),
    ("gemma-3-27b", ParallelConfig(tp=2)),
    ("gpt-oss-120b", ParallelConfig(tp=2)),
    ("deepseek-v3", ParallelConfig(tp=8)),
    ("deepseek-v3", ParallelConfig(tp=4, dp=8, ep=32)),
    ("qwen3-30b-a3b", ParallelConfig(tp=1, dp=4, ep=4)),
    ("deepseek-v3.2", ParallelConfig(tp=8)),
    ("llama-4-scout", ParallelConfig(tp=4)),
]


def work_of(cost: CostModel, sequences: list[tuple[int, int]], copies: int = 0) -> StepWork:
    """A step of sequences of (tokens computed before, tokens computed now), each of which gets a token."""
    ids = list(range(len(sequences)))
    starts, counts = [start for start, _ in sequences], [count for _, count in sequences]
    return StepWork.of(StepPlan(0, ids, starts, counts, ids, ids, block_copies=[(0, 0)] * copies), cost.windows)


@pytest.mark.parametrize("case", CASES, ids=str)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 9000), st.sampled_from((1, 1, 1, 2, 70, 900))), min_size=1, max_size=40
    ),
    copies=st.integers(0, 3),
)
def test_the_fast_sum_is_that_of_the_breakdown(
    case: tuple[str, ParallelConfig], sequences: list[tuple[int, int]], copies: int
) -> None:
    name, layout = case
    cost = CostModel(find_shape(name), GPU, replace(layout, pp=1))
    work = work_of(cost, sequences, copies)
    assert cost.step_seconds(work) == pytest.approx(sum(cost.breakdown(work).values()), rel=1e-9)


def test_a_dense_step_by_hand() -> None:
    """OPT-13B, one prompt of 100 tokens and two sequences at 50 and 300, on one device."""
    shape = find_shape("opt-13b")
    factors = Factors(compute=0.5, bandwidth=0.8, attention_compute=0.25, attention_bandwidth=0.4)
    device = replace(GPU, factors=factors, half_rows=4.0)
    cost = CostModel(shape, device)
    found = cost.breakdown(work_of(cost, [(0, 100), (50, 1), (300, 1)]))
    peak, bandwidth = device.peaks["float16"], device.bandwidth
    rows, hidden, layers = 102, 5120, 40

    def product(weights: float, width: float, rows: int) -> float:
        return max(2 * (rows + 4) * weights / (0.5 * peak), 2 * (weights + rows * width) / (0.8 * bandwidth))

    projections = layers * product(4 * hidden**2, hidden + 3 * hidden + 2 * hidden, rows)
    mlp = layers * product(8 * hidden**2, 2 * (hidden + 4 * hidden), rows)
    vocabulary = shape.vocab * hidden
    assert found["projections"] == pytest.approx(projections)
    assert found["mlp"] == pytest.approx(mlp)
    logits = product(vocabulary, hidden + shape.vocab, 3)
    assert found["logits"] == pytest.approx(logits)
    assert found["sampling"] == pytest.approx(3 * shape.vocab * LOGIT_BYTES * LOGIT_PASSES / (0.8 * bandwidth))
    pairs, context, kept = 100 * 101 / 2, 100, 2 * hidden * 2
    prefill = layers * max(
        4 * pairs * hidden / (0.25 * peak), (context * kept + 100 * 2 * hidden * 2) / (0.4 * bandwidth)
    )
    assert found["prefill attention"] == pytest.approx(prefill)
    runs = 1 + device.run_overhead / (16 * 128 * 2)  # of the keys, or the values, of a head in a block
    decode = layers * 352 * max(4 * hidden / (0.25 * peak), runs * kept / (0.4 * bandwidth))
    assert found["decode attention"] == pytest.approx(decode)
    assert found["elementwise"] == pytest.approx(layers * ROW_PASSES * rows * hidden * 2 / (0.8 * bandwidth))
    launches = (layers * KERNELS_PER_LAYER + KERNELS_PER_STEP) * device.launch_overhead
    assert found["launches"] == pytest.approx(launches)
    assert found["per token"] == pytest.approx(rows * device.token_overhead)
    assert found["per sequence"] == pytest.approx(3 * device.sequence_overhead)


def test_few_rows_read_and_many_multiply() -> None:
    shape, device = find_shape("llama-3-8b"), replace(GPU, half_rows=0.0)
    cost = CostModel(shape, device)
    one = cost.breakdown(work_of(cost, [(10, 1)]))["mlp"]
    weights = 32 * 3 * 4096 * 14336
    assert one == pytest.approx(2 * weights / (device.bandwidth * device.factors.bandwidth), rel=0.001)
    many = cost.breakdown(work_of(cost, [(0, 8000)]))["mlp"]
    assert many == pytest.approx(2 * 8000 * weights / (device.peak("bfloat16") * device.factors.compute))


def test_experts_are_read_as_tokens_come_to_them() -> None:
    shape = find_shape("mixtral-8x7b")
    device = replace(GPU, half_rows=0.0)
    cost = CostModel(shape, device)
    expert = 32 * 2 * shape.expert_parameters / (device.bandwidth * device.factors.bandwidth)

    def read(num_tokens: int) -> float:
        return cost.breakdown(work_of(cost, [(10, 1)] * num_tokens))["experts"] / expert

    assert read(1) == pytest.approx(2, rel=0.01)
    assert read(2) == pytest.approx(8 * (1 - 0.75**2), rel=0.01)
    assert read(40) == pytest.approx(8, rel=0.03)


def test_a_latent_is_read_instead_of_heads() -> None:
    shape = find_shape("deepseek-v3")
    cost = CostModel(shape, find("h200"), ParallelConfig(tp=8))
    hardware = cost.hardware
    context = 1_000_000
    seconds = cost.breakdown(work_of(cost, [(context - 1, 1)]))["decode attention"]
    by_bytes = (
        (1 + hardware.run_overhead / (16 * 576 * 2))
        * 61
        * context
        * 576
        * 2
        / (hardware.bandwidth * hardware.factors.attention_bandwidth)
    )
    pairs = 61 * context * (128 / 8) * 2 * (576 + 512)
    assert seconds == pytest.approx(
        max(by_bytes, pairs / (hardware.peak("bfloat16") * hardware.factors.attention_compute))
    )
    alone = CostModel(shape, replace(hardware, memory=1e12), ParallelConfig(tp=1))
    assert alone.breakdown(work_of(alone, [(context - 1, 1)]))["decode attention"] >= seconds


def test_an_indexer_reads_all_and_attention_what_it_chooses() -> None:
    shape = find_shape("deepseek-v3.2")
    cost = CostModel(shape, replace(find("h200"), run_overhead=0.0), ParallelConfig(tp=8))
    hardware = cost.hardware
    rate = hardware.peak("bfloat16") * hardware.factors.attention_compute
    bandwidth = hardware.bandwidth * hardware.factors.attention_bandwidth

    def seconds(context: int) -> float:
        return cost.breakdown(work_of(cost, [(context - 1, 1)]))["decode attention"]

    def by_hand(context: int) -> float:
        chosen = min(context, 2048)
        latent = max(chosen * 576 * 2 / bandwidth, chosen * 128 / 8 * 2 * (576 + 512) / rate)
        return 61 * (latent + context * max(128 * 2 / bandwidth, 64 * 128 * 2 / rate))

    for context in (100, 2048, 100_000):
        assert seconds(context) == pytest.approx(by_hand(context))
    work = work_of(cost, [(2000, 100)])
    assert work.prefill_pairs == [sum(min(token + 1, 2048) for token in range(2000, 2100)), sum(range(2001, 2101))]
    (attention,) = shape.attention_counts
    assert attention.read_elements(100) == 100 * (576 + 128)
    assert attention.read_elements(100_000) == 2048 * 576 + 100_000 * 128


def test_chunks_begin_anew() -> None:
    shape = find_shape("llama-4-scout")
    cost = CostModel(shape, GPU)
    chunked = next(i for i, window in enumerate(cost.windows) if window is not None)
    assert cost.windows[chunked] == ChunkTokens(8192)
    for start, count in ((0, 5), (8190, 5), (8192, 1), (20_000, 1), (8000, 20_000)):
        work = work_of(cost, [(start, count)])
        pairs = sum(token % 8192 + 1 for token in range(start, start + count))
        if count == 1:
            assert work.decode_context[chunked] == pairs
        else:
            assert work.prefill_pairs[chunked] == pairs
            assert work.prefill_context[chunked] == start + count - start // 8192 * 8192
    attention = next(each for each in shape.attention_counts if each.kind == "chunked")
    elements = attention.token_elements()
    assert [attention.read_elements(n) // elements for n in (1, 8192, 8193, 10_000)] == [1, 8192, 1, 1808]


def test_attention_over_blocks_costs_what_their_runs_cost() -> None:
    """The paper's Fig. 18a at blocks of 16; prompts, which are computed from rows that lie together, know no blocks."""
    cost = CostModel(find_shape("opt-13b"), find("a100-40g"))
    steps = {"decode attention": work_of(cost, [(456, 1)] * 7), "prefill attention": work_of(cost, [(0, 200)])}

    def seconds(block_tokens: int) -> dict[str, float]:
        cost.block_tokens = block_tokens
        for work in steps.values():
            assert cost.step_seconds(work) == pytest.approx(sum(cost.breakdown(work).values()))
        return {name: cost.breakdown(work)[name] for name, work in steps.items()}

    contiguous = seconds(2048)
    assert seconds(16)["decode attention"] == pytest.approx(1.25 * contiguous["decode attention"], rel=0.01)
    assert seconds(1)["decode attention"] == pytest.approx(5 * contiguous["decode attention"], rel=0.01)
    assert seconds(1)["prefill attention"] == contiguous["prefill attention"]


def test_a_window_bounds_what_is_read() -> None:
    shape = find_shape("gemma-3-27b")
    full = with_attention(shape)
    short, long = [(500, 1)], [(100_000, 1)]
    for case, least, most in ((short, 0.99, 1.01), (long, 4.0, 6.5)):
        hybrid, plain = CostModel(shape, GPU), CostModel(full, GPU)
        ratio = (
            plain.breakdown(work_of(plain, case))["decode attention"]
            / hybrid.breakdown(work_of(hybrid, case))["decode attention"]
        )
        assert least < ratio < most


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_sharing_layers_shares_the_work_and_costs_all_reduces(name: str) -> None:
    shape = find_shape(name)
    steps = {}
    for tp in (1, 2, 4, 8):
        cost = CostModel(shape, GPU, ParallelConfig(tp=tp))
        steps[tp] = cost.breakdown(work_of(cost, [(500, 1)] * 32))
    assert "all-reduce" not in steps[1]
    for tp in (2, 4, 8):
        assert steps[tp]["projections"] < 1.05 * steps[1]["projections"] / tp * (
            1.6 if shape.attention.kind == "latent" else 1
        )
        row = 32 * shape.hidden * 2
        link = GPU.link_bandwidth * GPU.factors.link
        reduces = 2 * shape.num_layers
        gathered = 32 * shape.vocab * 2 * (tp - 1) / tp / link
        expected = (reduces + 1) * GPU.link_latency + reduces * 2 * (tp - 1) / tp * row / link + gathered
        assert steps[tp]["all-reduce"] == pytest.approx(expected)


def test_more_devices_than_a_node_meet_on_the_network() -> None:
    shape = find_shape("llama-3.1-405b")
    seconds = {}
    for tp in (8, 16):
        cost = CostModel(shape, GPU, ParallelConfig(tp=tp))
        seconds[tp] = cost.breakdown(work_of(cost, [(0, 4000)]))["all-reduce"]
    assert seconds[16] > 5 * seconds[8]


def test_pipeline_stages_take_turns() -> None:
    shape = find_shape("llama-3-70b")
    one, four = CostModel(shape, GPU, ParallelConfig(tp=2)), CostModel(shape, GPU, ParallelConfig(tp=2, pp=4))
    sequences = [(500, 1)] * 64
    whole = one.step_seconds(work_of(one, sequences))
    assert whole < four.step_seconds(work_of(four, sequences)) < 2 * whole
    # With the next step in flight nothing waits: a stage of a quarter of the layers, four times over.
    overlapped = four.step_seconds(work_of(four, sequences), overlapped=True)
    assert overlapped <= four.step_seconds(work_of(four, sequences))
    assert four.weight_bytes_per_device < 0.3 * one.weight_bytes_per_device


def test_experts_spread_over_more_devices_are_read_less_and_visited() -> None:
    shape = find_shape("deepseek-v3")
    device = find("h200")
    narrow, wide = (
        CostModel(shape, device, ParallelConfig(tp=8)),
        CostModel(shape, device, ParallelConfig(tp=8, dp=8, ep=64)),
    )
    sequences = [(1000, 1)] * 256
    before, after = narrow.breakdown(work_of(narrow, sequences)), wide.breakdown(work_of(wide, sequences))
    assert after["experts"] + after["exchange"] < 0.8 * before["experts"]
    experts = shape.routed_parameters
    assert narrow.weight_bytes_per_device - wide.weight_bytes_per_device == pytest.approx(experts / 8 - experts / 64)
    # A token goes to three other nodes in eight bits and comes back in sixteen, half of the way over the network.
    one, two = ([(1000, 1)] * count for count in (1000, 2000))
    beyond = CostModel(
        shape, replace(device, peaks=dict.fromkeys(device.peaks, math.inf)), ParallelConfig(tp=8, dp=8, ep=64)
    )
    extra = beyond.breakdown(work_of(beyond, two))["experts"] - beyond.breakdown(work_of(beyond, one))["experts"]
    nodes = 7 * (1 - (7 / 8) ** 8)
    sent = 58 * 1000 / 8 * nodes * 7168 * 3 / (device.network_bandwidth * device.factors.link)
    read = 58 * 1000 * (2 * 7168 + 4 * 2048) * 2 / (device.bandwidth * device.factors.bandwidth)
    assert extra == pytest.approx(sent + read, rel=0.01)
    # The latencies: every pick of a token but those that stay, there and back, beside two latencies a layer.
    assert after["exchange"] == pytest.approx(2 * shape.num_moe_layers * device.network_latency)


def test_precision_sets_bytes_and_peak() -> None:
    shape = find_shape("llama-3-70b")
    full, half = CostModel(shape, GPU), CostModel(shape, GPU, precision=Precision.of(shape, "float8"))
    few, many = [(10, 1)], [(0, 8000)]
    for case in (few, many):
        ratio = half.breakdown(work_of(half, case))["mlp"] / full.breakdown(work_of(full, case))["mlp"]
        assert ratio == pytest.approx(0.5, rel=0.03)
    device = replace(GPU, run_overhead=0.0)
    full, kv = CostModel(shape, device), CostModel(shape, device, precision=Precision.of(shape, None, "float8"))
    long = [(50_000, 1)]
    ratio = (
        kv.breakdown(work_of(kv, long))["decode attention"] / full.breakdown(work_of(full, long))["decode attention"]
    )
    assert ratio == pytest.approx(0.5, rel=0.01)


def test_weights_of_a_device_add_up() -> None:
    for name in ("llama-3-8b", "gpt-oss-120b", "deepseek-v3", "opt-13b"):
        shape = find_shape(name)
        cost = CostModel(shape, find("b200"))
        assert cost.weight_bytes_per_device == pytest.approx(cost.weight_bytes)
        assert cost.weight_bytes == pytest.approx(shape.weight_bytes(), rel=0.001)


def test_a_device_without_limits_takes_no_time() -> None:
    shape = find_shape("mixtral-8x7b")
    free = replace(
        GPU,
        peaks=dict.fromkeys(GPU.peaks, math.inf),
        bandwidth=math.inf,
        launch_overhead=0.0,
        token_overhead=0.0,
        sequence_overhead=0.0,
    )
    cost = CostModel(shape, free)
    assert cost.step_seconds(work_of(cost, [(0, 100), (5, 1)])) == 0.0


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "does not divide"),
        ({"pp": 81}, "exceeds the 80 layers"),
        ({"tp": 2, "dp": 2, "ep": 4}, "does not share out the experts"),
        ({"tp": 4, "dp": 2, "ep": 6}, "must be a multiple of tp"),
        ({"tp": 4, "dp": 3, "ep": 8}, "whole groups"),
        ({"tp": 16, "pp": 81}, "exceeds the 80 layers"),
    ],
)
def test_layouts_that_cannot_be(layout: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CostModel(find_shape("llama-3-70b"), GPU, ParallelConfig(**layout))


@pytest.mark.parametrize("tp", [3, 6, 12])
def test_key_value_heads_are_shared_out_evenly_or_copied(tp: int) -> None:
    """Of 8 heads three devices cannot have as many each; the heads of queries alone would divide."""
    shape = with_attention(find_shape("llama-3-8b"), num_heads=24)
    with pytest.raises(UserError, match="8 key-value heads"):
        CostModel(shape, GPU, ParallelConfig(tp=tp))


def test_stages_in_two_nodes_hand_over_by_the_network() -> None:
    shape, seconds = find_shape("llama-3-70b"), {}
    for tp, pp in ((4, 2), (8, 2)):
        cost = CostModel(shape, GPU, ParallelConfig(tp=tp, pp=pp))
        seconds[tp * pp] = cost.breakdown(work_of(cost, [(0, 4000)]))["hand-over"]
    row = 4000 * shape.hidden * 2
    near, far = GPU.link_bandwidth * GPU.factors.link, GPU.network_bandwidth * GPU.factors.link
    assert seconds[8] == pytest.approx(GPU.link_latency + row / near)
    assert seconds[16] == pytest.approx(GPU.network_latency + row / far)


DATA_SHEETS = {
    # GB, GB/s, dense TFLOPS of bfloat16 and float8, dense TOPS of int8, GB/s and direction to peers and to the host
    "a100-40g": (40, 1555, 312, None, 624, 300, 32),
    "a100-80g": (80, 2039, 312, None, 624, 300, 32),
    "h100": (80, 3350, 989, 1979, 1979, 450, 64),
    "h100-pcie": (80, 2000, 756, 1513, 1513, 64, 64),
    "h200": (141, 4800, 989, 1979, 1979, 450, 64),
    "l4": (24, 300, 121, 242, 242, 32, 32),
    "b200": (180, 7700, 2250, 4500, 4500, 900, 64),
    "gb200": (186, 8000, 2500, 5000, 5000, 900, 225),
}
"""The manufacturer's data sheets; what they give with sparsity, and for both directions of a link, is halved. The two
GPUs of a GB200 share 900 GB/s to their CPU, both directions together."""


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_profiles_are_the_data_sheets(name: str) -> None:
    device = find(name)
    memory, bandwidth, half, eighth, integer, link, host = DATA_SHEETS[name]
    assert (device.memory, device.bandwidth) == (memory * 1e9, bandwidth * 1e9)
    assert device.peaks["bfloat16"] == device.peaks["float16"] == half * 1e12
    assert device.peaks.get("float8") == (None if eighth is None else eighth * 1e12)
    assert device.peaks["int8"] == integer * 1e12
    assert (device.link_bandwidth, device.pcie_bandwidth) == (link * 1e9, host * 1e9)
    assert device.node_size == (72 if name == "gb200" else 8)


def test_profiles_go_to_files_and_back() -> None:
    for name, hardware in profiles().items():
        assert from_json(name, to_json(hardware)[name]) == hardware
    entry = to_json(GPU)["h100"]
    with pytest.raises(UserError, match="must be a number"):
        from_json("x", {**entry, "bandwidth": "fast"})
    with pytest.raises(UserError, match="bandwith"):
        from_json("x", {**entry, "bandwith": 1})
    with pytest.raises(UserError, match="at most 1"):
        from_json("x", {**entry, "factors": {"compute": 1.5}})
    for changes in ({"bandwidth": 0}, {"memory": 0.0}, {"peaks": {"float16": 0}}, {"node_size": 0}, {"node_size": 1.5}):
        with pytest.raises(UserError, match="must be above zero"):
            from_json("x", {**entry, **changes})


def test_a_device_multiplies_what_it_knows() -> None:
    shape: ModelShape = find_shape("deepseek-v3")
    old: Hardware = find("a100-80g")
    with pytest.raises(UserError, match="does not multiply float8"):
        CostModel(shape, old, ParallelConfig(tp=8))
    assert CostModel(shape, old, ParallelConfig(tp=8), Precision.of(shape, "bfloat16")).weight_bytes > 1.3e12
