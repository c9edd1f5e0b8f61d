"""Placing a program's buffers: what a kernel reads is still there, whatever shares its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.arguments import NormWeights
from quire.kernels.cpu.recorder import ARENA, Buffer, RecordedRows, Recorder, fuse_norms, hand_over_rows, place_buffers
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.native import NativeOperations
from quire.layers.operations import TorchOperations


@dataclass
class Model:
    """A random chain of kernels, as a recorder sees it."""

    recorder: Recorder = field(default_factory=Recorder)
    buffers: list[Buffer] = field(default_factory=list)
    used_up: set[Buffer] = field(default_factory=set)


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Buffer]:
    model = Model()
    model.buffers.append(model.recorder.call("source", draw(st.integers(1, 70))))
    for _ in range(draw(st.integers(0, 25))):
        usable = [buffer for buffer in model.buffers if buffer not in model.used_up]
        inputs = draw(st.lists(st.sampled_from(usable), max_size=2)) if usable else []
        over = draw(st.sampled_from([None, *usable]))
        buffers: dict[str, Buffer | None] = {f"input{i}": buffer for i, buffer in enumerate(inputs)}
        width = draw(st.integers(1, 70)) if over is None else over.width
        if over is not None:
            model.used_up.add(over)
            buffers["residual"] = over
        model.buffers.append(model.recorder.call("kernel", width, over=over, buffers=buffers))
    usable = [buffer for buffer in model.buffers if buffer not in model.used_up]
    return model, draw(st.sampled_from(usable))


@given(models())
def test_every_input_is_intact_when_it_is_read(case: tuple[Model, Buffer]) -> None:
    model, result = case
    calls = model.recorder.calls
    size = place_buffers(calls, (result,))
    owner: list[Buffer | None] = [None] * size
    for call in calls:
        for buffer in call.buffers.values():
            if buffer is not None:
                assert owner[buffer.offset : buffer.offset + buffer.stride] == [buffer] * buffer.stride
        inputs = [b for b in call.buffers.values() if b is not None and b is not call.over]
        place = range(call.out.offset, call.out.offset + call.out.stride)
        for buffer in inputs:
            # A kernel may write before it has read everything: only `over` may share its output's place.
            assert not set(place) & set(range(buffer.offset, buffer.offset + buffer.stride))
        for element in place:
            owner[element] = call.out
    assert owner[result.offset : result.offset + result.stride] == [result] * result.stride


def test_a_decoder_needs_few_places() -> None:
    recorder = Recorder()
    x = recorder.call("embed", 64)
    for _ in range(30):
        for inner in (192, 256):
            normed = recorder.call("norm", 64, buffers={"x": x})
            wide = recorder.call("linear", inner, buffers={"x": normed, "residual": None})
            x = recorder.call("linear", 64, over=x, buffers={"x": wide, "residual": x})
    assert place_buffers(recorder.calls, (x,)) == 64 + 64 + 256


def _chain(*, result_is_norm: bool = False, reads_twice: bool = False, over_input: bool = False) -> list[str]:
    """The kernels that a norm and the linear layer behind it become."""
    recorder = Recorder()
    x = recorder.call("embed", 64)
    constants = {"weight": 0, "bias": 0, "epsilon": 1e-5, "subtract_mean": False, "width": 64}
    normed = recorder.call("norm", 64, buffers={"x": x}, **constants)
    out = recorder.call(
        "linear", 64, over=x if over_input else None, buffers={"x": normed, "residual": x if over_input else None}
    )
    if reads_twice:
        recorder.call("elementwise", 64, buffers={"x": out, "y": normed})
    calls = fuse_norms(recorder.calls, (normed if result_is_norm else out,))
    assert all(call.buffers["x"] is x for call in calls if "norm" in call.constants)
    return [call.kernel for call in calls]


def test_a_linear_layer_takes_the_norm_that_it_alone_reads() -> None:
    assert _chain() == ["embed", "linear"]
    assert _chain(result_is_norm=True) == ["embed", "norm", "linear"]
    assert _chain(reads_twice=True) == ["embed", "norm", "linear", "elementwise"]
    assert _chain(over_input=True) == ["embed", "norm", "linear"]


def test_a_linear_layer_that_only_the_next_one_reads_says_so() -> None:
    recorder = Recorder()
    x = recorder.call("embed", 64)
    inner = recorder.call("linear", 96, buffers={"x": x, "residual": None})
    out = recorder.call("linear", 64, buffers={"x": inner, "residual": x})
    twice = recorder.call("linear", 64, buffers={"x": out, "residual": None})
    result = recorder.call("linear", 64, buffers={"x": twice, "residual": out})
    last = recorder.call("linear", 64, buffers={"x": result, "residual": None})

    def feeding(result: Buffer) -> list[Buffer]:
        return [call.out for call in hand_over_rows(recorder.calls, (result,)) if "feeds_next" in call.constants]

    assert feeding(last) == [inner, twice, result]
    assert feeding(result) == [inner, twice]


def test_a_result_may_be_older_than_the_last_call() -> None:
    recorder = Recorder()
    first = recorder.call("source", 16)
    second = recorder.call("kernel", 16, buffers={"x": first})
    recorder.call("kernel", 16, buffers={"x": second})
    place_buffers(recorder.calls, (first,))
    offsets = [call.out.offset for call in recorder.calls]
    assert len(set(offsets)) == 3


def test_what_is_changed_in_place_must_not_be_needed_later() -> None:
    recorder = Recorder()
    table = recorder.call("embed", 16)
    recorder.call("embed", 16, over=table, in_place=True)
    recorder.call("norm", 16, buffers={"x": table})
    with pytest.raises(AssertionError, match="still needed"):
        place_buffers(recorder.calls, (table,))


def test_memory_that_the_caller_brings_is_not_placed() -> None:
    recorder = Recorder()
    hidden = recorder.external(24, 24)
    logits = recorder.call("linear", 100, buffers={"x": hidden, "residual": None})
    recorder.redirect(logits, recorder.external(100, 100))
    assert place_buffers(recorder.calls, (logits,)) == 0
    assert (hidden.area, logits.area, logits.stride) == (ARENA + 1, ARENA + 2, 100)


def test_a_chain_over_one_result_goes_where_its_last_call_goes() -> None:
    operations, recorder = NativeOperations(), Recorder()
    hidden = recorder.external(24, 24)
    logits = recorder.call("linear", 100, buffers={"x": hidden, "residual": None})
    capped = operations.soft_cap(operations.scale(logits, 0.5), 3.0)
    recorder.redirect(capped, recorder.external(100, 112))
    assert place_buffers(recorder.calls, (capped,)) == 0
    assert all((call.out.area, call.out.stride) == (ARENA + 2, 112) for call in recorder.calls)


def test_a_result_that_is_read_twice_stays_in_the_arena() -> None:
    operations, recorder = NativeOperations(), Recorder()
    x = recorder.call("linear", 16, buffers={"x": recorder.external(16, 16), "residual": None})
    doubled = operations.add(operations.scale(x, 2.0), x)
    recorder.redirect(doubled, recorder.external(16, 16))
    assert x.area == ARENA


@pytest.mark.parametrize("start", [0, 5, 40])
def test_some_columns_of_a_matrix_are_normalised(start: int) -> None:
    weights = NormWeights(21, torch.randn(21, generator=torch.Generator().manual_seed(1)), None, 1e-5, centred=False)
    x = torch.randn(10, 61, generator=torch.Generator().manual_seed(2))
    recorder = Recorder()
    source, target = recorder.external(61, 61), recorder.external(61, 61)
    copied = NativeOperations().scale(source, 1.0)
    result = NativeOperations().norm_columns(weights, copied, start)
    result = NativeOperations().scale(result, 1.0)
    recorder.redirect(result, target)
    program = recorder.finish_program(result, NativeRuntime("auto", 2), 64)
    out = torch.zeros(64, 61)
    program.run(10, externals=[x, out])
    expected = TorchOperations().norm_columns(weights, x.clone(), start)
    torch.testing.assert_close(out[:10], expected)
    assert not torch.equal(expected, x)


def test_a_program_leaves_for_torch_and_comes_back() -> None:
    """Kernels, torch, kernels, torch over outside memory: with all rows, and with those that are read."""
    operations, recorder = NativeOperations(), Recorder()
    source, target = recorder.external(24, 24), recorder.external(48, 48)
    doubled = operations.add(operations.scale(source, 3.0), source)
    squared = recorder.call_torch(torch.square, 24, [doubled])
    kept = operations.gather_rows(squared, RecordedRows(recorder))
    scaled = operations.scale(recorder.call_torch(torch.neg, 24, [kept]), 0.5)
    last = recorder.call_torch(lambda x: torch.cat((x, x + 7), dim=1), 48, [scaled])
    recorder.redirect(last, target)
    program = recorder.finish_program(last, NativeRuntime("auto", 2), 64)
    for rows in (None, torch.tensor([2, 3, 9])):
        x, out = torch.randn(10, 24), torch.zeros(64, 48)
        program.run(10, externals=[x, out], read_rows=rows)
        expected = -0.5 * torch.square(4 * x)
        if rows is not None:
            expected = expected[rows]
        torch.testing.assert_close(out[: len(expected)], torch.cat((expected, expected + 7), dim=1))
        assert not out[len(expected) :].any()


def test_what_torch_raises_ends_the_run() -> None:
    """What comes behind it does not run, and the next run is whole."""
    operations, recorder = NativeOperations(), Recorder()
    source, target = recorder.external(24, 24), recorder.external(24, 24)

    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise ConnectionError("the other rank is gone")
        return x

    result = operations.scale(recorder.call_torch(refuse, 24, [source]), 2.0)
    recorder.redirect(result, target)
    program = recorder.finish_program(result, NativeRuntime("auto", 2), 64)
    x, out = torch.full((10, 24), -1.0), torch.zeros(64, 24)
    with pytest.raises(ConnectionError, match="the other rank is gone"):
        program.run(10, externals=[x, out])
    assert not out.any()
    program.run(10, externals=[-x, out])
    assert (out[:10] == 2).all()


def test_torch_may_run_another_program_of_the_same_threads() -> None:
    operations, runtime = NativeOperations(), NativeRuntime("auto", 2)
    inner = Recorder()
    doubled = operations.scale(inner.external(24, 24), 2.0)
    inner.redirect(doubled, inner.external(24, 24))
    inner_program = inner.finish_program(doubled, runtime, 64)

    def run_inner(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(64, 24)
        inner_program.run(len(x), externals=[x, out])
        return out[: len(x)]

    recorder = Recorder()
    source, target = recorder.external(24, 24), recorder.external(24, 24)
    result = operations.add(operations.scale(recorder.call_torch(run_inner, 24, [source]), 3.0), source)
    recorder.redirect(result, target)
    program = recorder.finish_program(result, runtime, 64)
    x, out = torch.randn(10, 24), torch.zeros(64, 24)
    program.run(10, externals=[x, out])
    torch.testing.assert_close(out[:10], 7 * x)


def test_all_rows_do_not_meet_the_rows_that_are_read() -> None:
    recorder = Recorder()
    whole, part = recorder.call("embed", 16), recorder.call("embed", 16)
    part = recorder.gather(part)
    with pytest.raises(AssertionError, match="all rows meet"):
        recorder.call("elementwise", 16, buffers={"x": part, "y": whole})
