"""The kernels of adapters against plain torch, and the programs that have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import RecordedIndices, RecordedRows, Recorder, fuse_adapters
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.adapters import Adapters, AdapterStack, LowRank, Part, StepSlots, TorchAdapterStorage, add_adapted
from quire.layers.native_adapters import NativeAdapterStorage, record_adapted
from quire.quantization.interface import LinearShape
from quire.quantization.packed import PackedLinear
from quire.quantization.weight_format import WeightFormat
from tests.long import one_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMN = 2
PARTS = {"narrow": (7,), "three": (16, 33, 48), "two": (100, 3)}
RANKS = {"1": (1,), "mixed": (8, 3, 16), "wide": (5, 64)}


def stacks(parts: Sequence[int], inputs: int, dtype: torch.dtype, ranks: Sequence[int]) -> tuple[Any, Any]:
    """The same adapters in slots 1 to 3, for torch and natively: the first part has a piece of its own, the others
    share one; slot 2 has nothing for that."""
    storages = (
        TorchAdapterStorage(3, max(ranks), torch.float32, torch.device("cpu")),
        NativeAdapterStorage(3, max(ranks), dtype),
    )
    found = []
    for storage in storages:
        stack = AdapterStack(inputs, 0, inputs, [Part(each, 0, each) for each in parts])
        stack.pieces = [range(1), range(1, len(parts))] if len(parts) > 1 else [range(1)]
        storage.attach(stack)
        generator = torch.Generator().manual_seed(3)
        for slot in (1, 2, 3):
            for piece, own in enumerate(stack.pieces):
                rank = ranks[(slot + piece) % len(ranks)]
                a = torch.randn(rank, inputs, generator=generator).to(dtype).float()
                b = [torch.randn(parts[part], rank, generator=generator).to(dtype).float() for part in own]
                if (slot, piece) != (2, 1):
                    storage.load(stack, slot, piece, LowRank(a, b, 0.5 * slot))
        found.append(stack)
    return found[0], found[1]


def run_natively(
    stack: AdapterStack,
    x: torch.Tensor,
    y: torch.Tensor,
    slots: torch.Tensor,
    isa: str,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    recorder = Recorder()
    given = recorder.external(x.shape[1], x.stride(0)), recorder.external(y.shape[1], y.stride(0))
    zero = [
        recorder.call(
            "elementwise",
            each.width,
            buffers={"x": each, "y": None},
            kind=_native.Elementwise.SCALE,
            factor=1.0,
            width=each.width,
        )
        for each in given
    ]
    if rows is not None:
        zero = [RecordedRows(recorder).recorder.gather(zero[1])] * 2
    out = record_adapted(stack, zero[0], zero[1], RecordedIndices(recorder, COLUMN))
    program = recorder.finish_program(out, NativeRuntime(isa, 2), 64)
    program.run(len(x), [None, None, slots], externals=(x, y), read_rows=rows)
    return program.result(len(x) if rows is None else len(rows)).clone()


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize(("dtype", "inputs", "parts", "ranks"), one_in(5, DTYPES, (5, 64, 91), PARTS, RANKS))
def test_against_torch(dtype: torch.dtype, inputs: int, parts: str, ranks: str, isa: str) -> None:
    sizes = PARTS[parts]
    plain, native = stacks(sizes, inputs, dtype, RANKS[ranks])
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(45, width, generator=generator) for width in (inputs, sum(sizes)))
    slots = torch.randint(0, 4, (45,), generator=generator)
    wanted = add_adapted(plain, x, y.clone(), StepSlots(slots, None))
    together = run_natively(native, x, y, slots, isa)
    torch.testing.assert_close(together, wanted, rtol=2e-5, atol=2e-4)
    assert torch.equal(together[slots == 0], y[slots == 0])
    for row in (0, 7, 44):
        one = slice(row, row + 1)
        alone = run_natively(native, x[one], y[one], slots[one].clone(), isa)
        assert torch.equal(alone[0], together[row]), "the same bits alone"


def test_other_slots_have_the_same_bits() -> None:
    _, native = stacks((16, 33, 48), 64, torch.bfloat16, (8,))
    x, y = torch.randn(5, 64), torch.randn(5, 97)
    before = run_natively(native, x, y, torch.full((5,), 1), "auto")
    storage = NativeAdapterStorage(3, 8, torch.bfloat16)
    storage.clear(native, 3)
    assert torch.equal(run_natively(native, x, y, torch.full((5,), 3), "auto"), y)
    assert torch.equal(run_natively(native, x, y, torch.full((5,), 1), "auto"), before)


def test_rows_that_are_read() -> None:
    """Behind a gather the slots are those of the rows that are read."""
    plain, native = stacks((64,), 64, torch.float32, (8,))
    x = torch.randn(9, 64)
    slots, rows = torch.tensor([1, 2, 0, 3, 1, 1, 2, 0, 3]), torch.tensor([1, 2, 5, 8])
    found = run_natively(native, x, x, slots, "auto", rows)
    torch.testing.assert_close(
        found, add_adapted(plain, x[rows], x[rows], StepSlots(slots, rows)), rtol=2e-5, atol=2e-4
    )


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_there_is_not(slot: int) -> None:
    _, native = stacks((16,), 16, torch.float32, (8,))
    with pytest.raises(ValueError, match="names an adapter's slot that there is none of"):
        run_natively(native, torch.randn(2, 16), torch.randn(2, 16), torch.tensor([0, slot]), "auto")


def test_a_pass_without_adapters_takes_no_slots() -> None:
    adapters = Adapters(TorchAdapterStorage(1, 8, torch.float32, torch.device("cpu")))
    with adapters.over(torch.zeros(4, dtype=torch.int64)):
        assert adapters.step is None
    with adapters.over(torch.tensor([0, 1])):
        assert adapters.step is not None
    assert adapters.step is None
    with adapters.over(None):
        assert adapters.step is None


def test_sizes_that_the_kernels_do_not_have() -> None:
    for slots, rank in ((0, 8), (1, 0), (1, 513)):
        with pytest.raises(ValueError, match="adapters of a size or type"):
            _native.AdapterTable(_native.WeightType.F32, slots, 8, rank, 1, [(0, 0, 16, 8)])
    with pytest.raises(ValueError, match="adapters of a size or type"):
        _native.AdapterTable(_native.WeightType.I8, 1, 8, 8, 1, [(0, 0, 16, 8)])


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("kind", ["plain", "gated", "odd parts"])
def test_a_linear_layer_adds_its_adapters_itself(kind: str, isa: str) -> None:
    """In its own sums, before the activation. Columns that begin within a panel's turn are added behind it."""
    parts = {"plain": (32, 16), "gated": (40, 40), "odd parts": (7, 30)}[kind]
    gated, width = kind == "gated", 40 if kind == "gated" else sum(parts)
    method = PackedLinear(WeightFormat("float32"))
    shape = LinearShape(
        64, sum(parts), False, torch.float32, torch.device("cpu"), "silu" if gated else None, gated=gated
    )
    parameters = method.create(shape)
    weight = torch.randn(sum(parts), 64, generator=torch.Generator().manual_seed(1))
    method.load_rows(parameters, "weight", weight, 0, sum(parts))
    stack = AdapterStack(64, 0, 64, [Part(each, 0, each) for each in parts])
    stack.pieces, stack.is_interleaved = [range(1), range(1, 2)], method.is_interleaved(parameters)
    storage = NativeAdapterStorage(2, 8, torch.float32)
    storage.attach(stack)
    generator = torch.Generator().manual_seed(2)
    deltas = torch.zeros(3, sum(parts), 64)
    for slot in (1, 2):
        for piece, rows in enumerate(parts):
            a, b = torch.randn(8, 64, generator=generator), torch.randn(rows, 8, generator=generator)
            storage.load(stack, slot, piece, LowRank(a, [b], 0.25))
            first = sum(parts[:piece])
            deltas[slot, first : first + rows] = 0.25 * b @ a
    recorder = Recorder()
    x = recorder.external(64, 64)
    products = method.products(parameters, x)
    adapted = record_adapted(stack, x, products, RecordedIndices(recorder, COLUMN))
    out = method.activate(parameters, adapted)
    kernels = [call.kernel for call in fuse_adapters(recorder.calls, [out])]
    fused = ["adapter_shrink", "adapted_linear"]
    assert kernels == (["linear", "adapter_shrink", "adapter_expand"] if kind == "odd parts" else fused)
    program = recorder.finish_program(out, NativeRuntime(isa, 2), 64)
    rows = torch.randn(37, 64, generator=generator)
    slots = torch.randint(0, 3, (37,), generator=generator)
    program.run(37, [None, None, slots], externals=(rows,))
    wanted = torch.einsum("toi,ti->to", weight.double() + deltas[slots].double(), rows.double())
    if gated:
        wanted = torch.nn.functional.silu(wanted[:, :40]) * wanted[:, 40:]
    torch.testing.assert_close(program.result(37)[:, :width].double(), wanted, rtol=1e-4, atol=1e-3)
