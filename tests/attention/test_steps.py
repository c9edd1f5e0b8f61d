"""Every back end attends with norms and rotation, and its step has every operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.attention.interface import AttentionBatch, AttentionStep
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.attention.torch_backend import TorchAttention, TorchAttentionStep
from quire.attention.triton_backend import TritonAttention, TritonAttentionStep
from quire.kernels.arguments import HeadWeights, LayerAttention, NormWeights, RotaryFrequencies
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import RecordedIndices, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.layers.device import DeviceOperations
from quire.layers.native import NativeOperations
from quire.layers.operations import Operations, TorchOperations
from quire.worker.cuda_graphs import _Pieces
from quire.worker.kv_tensors import allocate_pages, layer_pages
from tests.models.test_toy import Planner

HEADS, KV_HEADS, DIM, TOKENS, LAYERS = 4, 2, 16, 21, 2
WIDTH, KV_WIDTH = HEADS * DIM, 2 * KV_HEADS * DIM
LAYOUT = KVCacheLayout(16, 4, *group_layers([AttentionSpec(KV_HEADS, DIM, DIM, 4)] * LAYERS, 16))
POSITIONS = torch.arange(TOKENS)
BATCH = AttentionBatch(
    torch.tensor([0, TOKENS]),
    torch.tensor([0]),
    POSITIONS,
    torch.zeros(TOKENS, dtype=torch.int64),
    (torch.tensor([[3, 1]], dtype=torch.int32),),
    (torch.tensor([3, 1])[POSITIONS // 16] * 16 + POSITIONS % 16,),
)
FREQUENCIES = RotaryFrequencies(10.0 ** -torch.arange(DIM // 2).float(), 1.0, torch.float32)


def heads(layer: int) -> HeadWeights:
    norms = [NormWeights(DIM, torch.linspace(0.5, 1.5, DIM) + which, None, 1e-6, centred=False) for which in (0, 1)]
    return HeadWeights(LayerAttention(layer, HEADS, KV_HEADS, DIM, 0.25), *norms)


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of two layers, and the keys and values of the first."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(TOKENS, WIDTH, generator=generator),
        torch.randn(TOKENS, WIDTH, generator=generator),
        torch.randn(TOKENS, KV_WIDTH, generator=generator),
    )


def attend(operations: Operations, step: AttentionStep) -> torch.Tensor:
    """Both layers' queries over the first layer's keys: [T, 2 WIDTH]."""
    first, second, key_value = rows()
    turn = operations.rotation(FREQUENCIES, POSITIONS)
    results = [step.attend(heads(0), torch.cat((query, key_value), dim=1), turn) for query in (first, second)]
    return torch.cat(results, dim=1)


def torch_way() -> torch.Tensor:
    pages = layer_pages(allocate_pages(LAYOUT), LAYOUT, torch.float32)
    return attend(TorchOperations(), TorchAttention(LAYOUT, pages).plan(BATCH))


def device_way() -> torch.Tensor:
    pages = layer_pages(allocate_pages(LAYOUT), LAYOUT, torch.float32)
    options = {"num_heads": HEADS, "dtype": torch.float32, "max_num_seqs": 1, "max_model_len": 64}
    return attend(DeviceOperations(), Planner(TritonAttention(LAYOUT, pages, DeviceLimits(), **options)).plan(BATCH))


def native_way() -> torch.Tensor:
    backend = NativeAttention(LAYOUT, allocate_pages(LAYOUT), "float32", HEADS, 2)
    step, recorder = backend.plan(BATCH), Recorder()
    inputs = [recorder.external(WIDTH, WIDTH), recorder.external(WIDTH, WIDTH), recorder.external(KV_WIDTH, KV_WIDTH)]
    turn = NativeOperations().rotation(FREQUENCIES, RecordedIndices(recorder, _native.SLOT_POSITIONS))
    first, second, key_value = (recorder.call_torch(torch.clone, each.width, [each]) for each in inputs)
    joined = [
        recorder.call_torch(lambda *parts: torch.cat(parts, dim=1), WIDTH + KV_WIDTH, [query, key_value])
        for query in (first, second)
    ]
    results = [step.attend(heads(0), qkv, turn) for qkv in joined]
    result = recorder.call_torch(lambda *parts: torch.cat(parts, dim=1), 2 * WIDTH, results)
    program = recorder.finish_program(result, NativeRuntime("auto", 2), TOKENS)
    program.run(TOKENS, (None, POSITIONS), plans=step.plans, externals=rows())
    return program.result(TOKENS).clone()


@pytest.mark.parametrize("way", [native_way, device_way])
def test_back_ends_attend_as_plain_torch_does(way: Callable[[], torch.Tensor]) -> None:
    result = way()
    torch.testing.assert_close(result, torch_way(), rtol=0, atol=1e-5)
    assert result[:, :WIDTH].std() > 0.1


@pytest.mark.parametrize("step", [TorchAttentionStep, NativeAttentionStep, TritonAttentionStep, _Pieces])
def test_a_step_over_pages_has_every_operation(step: type[AttentionStep]) -> None:
    """Those of AttentionStep raise NotImplementedError, for steps of encoders, which attend alone."""
    operations = {name for name in vars(AttentionStep) if not name.startswith("_")}
    assert len(operations) == 4
    assert {name for name in operations if getattr(step, name) is getattr(AttentionStep, name)} == set()
