"""One model with full, windowed and stateful layers and routers, on the three back ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention
from quire.attention.torch_backend import TorchAttention
from quire.attention.triton_backend import TritonAttention, TritonAttentionStep
from quire.errors import ConfigError
from quire.kernels.arguments import LayerAttention
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.device import DeviceOperations
from quire.layers.native import NativeOperations
from quire.models.native import NativeModel
from quire.parallel.single import SINGLE_RANK
from quire.quantization.device import DeviceLinear
from quire.quantization.packed import PackedLinear
from quire.quantization.unquantized import UnquantizedLinear
from quire.quantization.weight_format import WeightFormat
from quire.worker.kv_tensors import allocate_pages
from tests.layers.helpers import torch_context
from tests.long import all_but_long
from tests.models.harness import PagedRunner, random_prompts
from tests.models.toy import HEADS, VOCABULARY, ToyModel
from tests.worker.platform.device_states import DeviceStatePlanner, device_batch

ORDERS = ["full window state", "state window full", "state full window"]


def context(operations: object, linear: object) -> LayerContext:
    cpu = torch.device("cpu")
    return LayerContext(torch.float32, cpu, "float32", SINGLE_RANK, operations, linear, linear, linear)


def torch_runner(order: str) -> PagedRunner:
    model = ToyModel(torch_context(), order)
    model.fill()
    return PagedRunner(model)


def native_runner(order: str) -> PagedRunner:
    toy = ToyModel(context(NativeOperations(), PackedLinear(WeightFormat("float32"))), order)
    toy.fill()
    runner = PagedRunner(NativeModel(toy, NativeRuntime("auto", 2)))
    runner.backend = NativeAttention(runner.layout, allocate_pages(runner.layout), "float32", HEADS, 2)
    return runner


@dataclass
class Planner:
    """Plans the device's attention for a batch of the host."""

    backend: TritonAttention

    def plan(self, batch: AttentionBatch) -> TritonAttentionStep:
        return self.backend.plan(device_batch(batch))


def device_runner(order: str) -> PagedRunner:
    model = ToyModel(context(DeviceOperations(), DeviceLinear(torch.float32, batch_invariant=True)), order)
    model.fill()
    runner = PagedRunner(model)
    runner.backend = Planner(
        TritonAttention(
            runner.layout,
            runner.layer_pages,
            DeviceLimits(),
            num_heads=HEADS,
            dtype=torch.float32,
            max_num_seqs=8,
            max_model_len=256,
            batch_invariant=True,
        )
    )
    runner.states = DeviceStatePlanner(runner.states)
    return runner


RUNNERS = {"torch": torch_runner, "native": native_runner, "device": device_runner}


def generate(runner: PagedRunner, num_tokens: int) -> list[list[int]]:
    """Two prompts together, one of them in chunks of which the first is computed alone."""
    prompts = random_prompts([21, 6], VOCABULARY)
    rows = [runner.add(prompt) for prompt in prompts]
    runner.step([(rows[0], 9)], last_only=True)
    runner.step([(rows[0], 5), (rows[1], 1)], last_only=True)
    return runner.greedy(rows, num_tokens)


@pytest.mark.parametrize("name", all_but_long(["native", "device"], ["native"]))
def test_the_same_tokens_on_every_back_end(name: str) -> None:
    for order in ORDERS if name == "native" else ORDERS[:1]:
        num_tokens = 24 if name == "native" else 3
        expected = generate(torch_runner(order), num_tokens)
        assert len({token for tokens in expected for token in tokens}) > 4, "tokens too alike to compare"
        assert generate(RUNNERS[name](order), num_tokens) == expected


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", ["torch", "native"])
def test_same_bits_alone_chunked_and_in_a_batch(name: str) -> None:
    prompts = random_prompts([19, 4, 11], VOCABULARY)
    together = RUNNERS[name](ORDERS[0])
    work = [(together.add(prompt), len(prompt)) for prompt in prompts]
    expected = [logits.clone() for logits in together.step(work)]
    for prompt, logits in zip(prompts, expected, strict=True):
        alone = RUNNERS[name](ORDERS[0])
        row = alone.add(prompt)
        chunks = [3] * (len(prompt) // 3) + ([len(prompt) % 3] if len(prompt) % 3 else [])
        parts = [alone.step([(row, chunk)])[0].clone() for chunk in chunks]
        assert torch.equal(torch.cat(parts), logits)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("chunk", all_but_long([300, 7, 128], [300, 128]))
def test_a_sequence_goes_on_from_any_snapshot_that_a_step_crossed(chunk: int) -> None:
    """300 tokens over blocks of 128: two snapshots. What is computed behind them has the bits of the first sequence."""
    (prompt,) = random_prompts([300], VOCABULARY)
    runner = PagedRunner(torch_runner(ORDERS[0]).model, max_len=384, max_rows=3)
    assert {group.block_size for group in runner.layout.groups} == {128}
    first = runner.add(prompt)
    parts = [runner.step([(first, min(chunk, 300 - start))])[0].clone() for start in range(0, 300, chunk)]
    for snapshot in (1, 2):
        row = runner.add(prompt)
        runner.rows[row].num_computed = 128 * snapshot
        for own, table in zip(runner.rows[row].tables, runner.rows[first].tables, strict=True):
            num_entries = snapshot * len(table) // 3
            own[:num_entries] = table[:num_entries]
        (logits,) = runner.step([(row, 300 - 128 * snapshot)])
        assert torch.equal(logits, torch.cat(parts)[128 * snapshot :])


@pytest.mark.parametrize(("operations", "backend"), [(NativeOperations(), "native"), (DeviceOperations(), "triton")])
def test_values_of_another_width_are_refused_where_they_are_not_computed(operations: object, backend: str) -> None:
    shape = LayerAttention(0, 4, 2, 16, 0.25, value_dim=24)
    linear = UnquantizedLinear(torch.float32)
    with pytest.raises(ConfigError, match=f"attention_backend='{backend}' computes values as wide as keys"):
        Attention(64, shape, qkv_bias=False, output_bias=False, context=context(operations, linear))


def test_values_of_another_width_in_a_layer() -> None:
    """Against float64: projections, the two widths in one page, and the projection of what is as wide as values."""
    shape = LayerAttention(0, 4, 2, 16, 0.25, value_dim=24)
    attention = Attention(64, shape, qkv_bias=False, output_bias=False, context=torch_context())
    generator, drawn = torch.Generator().manual_seed(0), {}
    for name, slot in attention.slots(("q", "k", "v"), "o").items():
        drawn[name] = torch.randn(slot.shape, generator=generator) / 8
        slot.load(drawn[name])
    layout = KVCacheLayout(16, 3, *group_layers([AttentionSpec(2, 16, 24, 4)], 16))
    backend = TorchAttention(layout, {0: torch.full((3, 16, 2, 40), 7.0)})
    positions = torch.arange(20)
    batch = AttentionBatch(
        torch.tensor([0, 20]),
        torch.tensor([0]),
        positions,
        torch.zeros(20, dtype=torch.int64),
        (torch.tensor([[2, 1]], dtype=torch.int32),),
        (torch.tensor([2, 1])[positions // 16] * 16 + positions % 16,),
    )
    x, residual = torch.randn(20, 64, generator=generator), torch.randn(20, 64, generator=generator)
    actual = attention(x, residual.clone(), None, backend.plan(batch))
    q, k, v = (x.double() @ drawn[f"{name}.weight"].double().T for name in "qkv")
    q, k, v = (part.unflatten(1, (-1, width)) for part, width in ((q, 16), (k, 16), (v, 24)))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * 0.25
    weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    expected = residual.double() + torch.einsum("hnl,lhd->nhd", weights, v).flatten(1) @ drawn["o.weight"].double().T
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
