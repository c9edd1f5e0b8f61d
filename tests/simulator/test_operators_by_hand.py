"""Terms of a step's cost that sums of others hide, each by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.parallel import ParallelConfig
from quire.simulator.cost import KERNELS_PER_LAYER, KERNELS_PER_STEP, CostModel, Precision
from quire.simulator.hardware import find
from quire.simulator.shape import find_shape
from tests.simulator.test_operators import GPU, work_of

PEAK = GPU.peaks["bfloat16"] * GPU.factors.compute
BANDWIDTH = GPU.bandwidth * GPU.factors.bandwidth


def model(name: str, layout: ParallelConfig | None = None) -> CostModel:
    return CostModel(find_shape(name), GPU, layout)


def test_a_copied_block_is_read_and_written() -> None:
    cost = model("llama-3-8b")
    block = 16 * 32 * 2 * 8 * 128 * 2
    found = cost.breakdown(work_of(cost, [(50, 1)], copies=3))
    assert found["block copies"] == pytest.approx(2 * 3 * block / BANDWIDTH)
    cost.block_tokens = 32
    assert cost.breakdown(work_of(cost, [(50, 1)], copies=3))["block copies"] == pytest.approx(
        2 * 3 * 2 * block / BANDWIDTH
    )


def test_rows_are_looked_up_and_written() -> None:
    cost = model("llama-3-8b")
    assert cost.breakdown(work_of(cost, [(0, 70)]))["embedding"] == pytest.approx(2 * 70 * 4096 * 2 / BANDWIDTH)


def test_every_expert_that_is_touched_starts_anew() -> None:
    """8,000 tokens pick two of eight experts each: all are touched, and each loses `half_rows` rows."""
    cost = model("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    rows = 2 * 8000 + 8 * GPU.half_rows
    assert cost.breakdown(work_of(cost, [(0, 8000)]))["experts"] == pytest.approx(32 * 2 * rows * expert / PEAK)
    halved = model("mixtral-8x7b", ParallelConfig(tp=2))
    found = halved.breakdown(work_of(halved, [(0, 8000)]))["experts"]
    assert found == pytest.approx(32 * 2 * rows * expert / 2 / PEAK)


def test_experts_that_are_shared_see_the_tokens_of_all_replicas() -> None:
    """Four replicas of one token a step, 128 experts of which 8 are picked: a device reads its part of what 4 tokens
    touch, 32 (1 - (15/16)^4)."""
    shape = find_shape("qwen3-30b-a3b")
    cost = CostModel(shape, GPU, ParallelConfig(dp=4, ep=4))
    touched = 32 * (1 - (1 - 8 / 128) ** 4)
    expert = 3 * 2048 * 768
    rows = 8 * (2 * 2048 + 4 * 768)
    read = 48 * 2 * (touched * expert + rows) / BANDWIDTH
    there_and_back = 2048 * (2 + 2) * 8 * 3 / 4 / (GPU.link_bandwidth * GPU.factors.link)
    found = cost.breakdown(work_of(cost, [(10, 1)]))
    assert found["experts"] == pytest.approx(read + 48 * there_and_back)
    assert found["exchange"] == pytest.approx(2 * 48 * GPU.link_latency)


def test_logits_are_shared_out() -> None:
    cost = model("llama-3-70b", ParallelConfig(tp=4))
    few = cost.breakdown(work_of(cost, [(10, 1)] * 8))["logits"]
    assert few == pytest.approx(2 * (128256 * 8192 / 4 + 8 * (8192 + 128256 / 4)) / BANDWIDTH)


def test_chunks_of_latent_attention_have_keys_and_values_of_heads() -> None:
    """A head's key has 128 + 64 elements, its value 128; each is multiplied and added."""
    hardware = find("h200")
    cost = CostModel(find_shape("deepseek-v3"), hardware, ParallelConfig(tp=8))
    found = cost.breakdown(work_of(cost, [(0, 4000)]))["prefill attention"]
    pairs = 4000 * 4001 / 2
    rate = hardware.peaks["bfloat16"] * hardware.factors.attention_compute
    assert found == pytest.approx(61 * 128 / 8 * pairs * 2 * (128 + 64 + 128) / rate)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_of_two_stages_by_hand(overlapped: bool) -> None:
    """64 sequences at once: a stage for all and another; or two halves, that fill the second stage one after the
    other, and with the next step in flight the first one as well."""
    cost = model("llama-3-70b", ParallelConfig(tp=2, pp=2))

    def stage(count: int) -> float:
        return sum(cost.breakdown(work_of(cost, [(500, 1)] * count)).values())

    expected = 2 * stage(32) if overlapped else min(2 * stage(64), 3 * stage(32))
    assert cost.step_seconds(work_of(cost, [(500, 1)] * 64), overlapped=overlapped) == pytest.approx(expected)
    alone = 2 * stage(1)
    assert cost.step_seconds(work_of(cost, [(500, 1)]), overlapped=overlapped) == pytest.approx(alone)


def test_weights_of_four_bits_are_multiplied_in_sixteen() -> None:
    shape = find_shape("llama-3-8b")
    weights = 32 * 3 * 4096 * 14336
    for dtype, size in (("int4", 0.5), ("mxfp4", 0.53125)):
        cost = CostModel(shape, GPU, precision=Precision.of(shape, dtype))
        many = cost.breakdown(work_of(cost, [(0, 8000)]))["mlp"]
        assert many == pytest.approx(2 * (8000 + GPU.half_rows) * weights / PEAK)
        few = cost.breakdown(work_of(cost, [(10, 1)]))["mlp"]
        rows = 32 * (4096 + 2 * 14336 + 14336 + 4096)
        assert few == pytest.approx((size * weights + 2 * rows) / BANDWIDTH)


def test_the_longest_stage_sets_the_pace_and_holds_the_most() -> None:
    """62 layers on four stages: 16 on the largest ones, for the last has fewer beside the output projection. A table of
    the vocabulary lies at either end."""
    cost = model("gemma-3-27b", ParallelConfig(pp=4))
    found = cost.breakdown(work_of(cost, [(10, 1)]))["launches"]
    assert found == pytest.approx((16 * KERNELS_PER_LAYER + KERNELS_PER_STEP) * GPU.launch_overhead)
    shape = find_shape("llama-3-70b")
    assert not shape.is_tied
    table = 128256 * 8192
    layers = shape.parameters() - 2 * table
    staged = CostModel(shape, GPU, ParallelConfig(tp=2, pp=2))
    assert staged.weight_bytes_per_device == pytest.approx(2 * (layers / 2 + table) / 2)
    plain = CostModel(shape, replace(GPU, memory=1e12))
    assert plain.weight_bytes_per_device == plain.weight_bytes == 2 * shape.parameters()
