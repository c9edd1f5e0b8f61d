"""How near mixtures of experts come to the machine's limits.

    python -m benchmarks.experts [--rounds 40] [--shape NAME] [--matmul-precision float32|bfloat16]

One layer's routed experts over random rows, as the engine runs them, in turns with what they are compared with:

- one row and sixteen: bytes of the ACTIVE experts a second, against the streaming-read loop of `make bench-kernels` and
  against linear layers that compute one row's experts one after the other, with a barrier behind each product;
- a prompt of 1,024 rows: products a second, against a dense gated MLP of the same format with as many products.

Rows choose experts anew in each call, and two layers are run in turn, so that weights come from memory. With one thread
the thread's own time counts, which other processes do not disturb; else the best of all rounds is what to look at.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.run import READ
from benchmarks.kernels.subjects.machine import Machine, aligned_rows
from quire.kernels.arguments import Routing
from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation, WeightType
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.packing import Arena, BlockMatrix, PackedMatrix
from quire.kernels.experts import route

PROMPT = 1024
Rates = tuple[int, int]
Runner = Callable[[], tuple[int, int]]
"""Returns the bytes of weights that it read and the operations that it did."""


@dataclass(frozen=True)
class Shape:
    """Of one layer. type: what the experts are stored in, int4 in groups of 128 with offsets, or where `blocks` in
    those of a GGUF file's Q4_0."""

    size: int
    intermediate: int
    num_experts: int
    top_k: int
    type: WeightType
    blocks: bool = False


SHAPES = {
    "qwen3-30b-a3b int4": Shape(2048, 768, 128, 8, WeightType.I4),
    "qwen3-30b-a3b q4_0": Shape(2048, 768, 128, 8, WeightType.I4, blocks=True),
    "gpt-oss-20b mxfp4": Shape(2880, 2880, 32, 4, WeightType.MXFP4),
}


def random_matrix(shape: Shape, inputs: int, outputs: int, *, gated: bool, arena: Arena) -> PackedMatrix:
    """Random bytes for values and scales: what they say does not matter, but that they are finite."""
    if shape.blocks:
        matrix: PackedMatrix = BlockMatrix("Q4_0", inputs, outputs, gated=gated, memory=arena.allocate)
    else:
        options = {"group_size": 128, "with_offsets": True} if shape.type == WeightType.I4 else {}
        matrix = PackedMatrix(shape.type, inputs, outputs, gated=gated, memory=arena.allocate, **options)
    matrix.data.random_(0, 256)
    for floats in (matrix.scales, matrix.offsets):
        if floats is not None:
            floats.fill_(0.01)
    if matrix.scale_codes is not None:
        matrix.scale_codes.fill_(120)
    return matrix


class Layer:
    """The experts of several layers, of which the active ones are run in turn."""

    def __init__(self, shape: Shape, machine: Machine, clock: Callable[[], float], num_layers: int = 2) -> None:
        arena = Arena()
        self.clock = clock
        self.shape, self.machine = shape, machine
        self.layers = [
            [
                [random_matrix(shape, shape.size, 2 * shape.intermediate, gated=True, arena=arena)
                 for _ in range(shape.num_experts)],
                [random_matrix(shape, shape.intermediate, shape.size, gated=False, arena=arena)
                 for _ in range(shape.num_experts)],
            ]
            for _ in range(num_layers)
        ]  # fmt: skip
        gate_up, down = self.layers[0]
        self.expert_bytes = gate_up[0].nbytes + down[0].nbytes

    def runner(self, rows: int) -> Callable[[], Rates]:
        """One layer over `rows` rows that choose anew; their choice is not part of the time."""
        shape, runtime = self.shape, self.machine.runtime
        x, out, routing = (aligned_rows(rows, width) for width in (shape.size, shape.size, 2 * shape.top_k))
        x.normal_()
        places = [_native.Ref(index, 0, area.stride(0)) for index, area in enumerate((x, out, routing))]
        programs = []
        for gate_up, down in self.layers:
            program = _native.Program(runtime.isa, runtime.pool, rows, runtime.native_precision)
            program.experts(
                gate_up=[each.as_native() for each in gate_up],
                down=[each.as_native() for each in down],
                gate_up_bias=[],
                down_bias=[],
                places=[],
                top_k=shape.top_k,
                activation=Activation.SILU,
                limit=0.0,
                weighs_input=False,
                counts=0,
                x=places[0],
                routing=places[2],
                residual=places[1],
                out=places[1],
            )
            programs.append(program)
        scratch = allocate(programs[0].scratch_bytes)
        order = itertools.cycle(programs)
        generator = torch.Generator().manual_seed(0)

        def choose() -> int:
            logits = torch.randn(rows, shape.num_experts, generator=generator)
            routing.copy_(route(Routing(shape.num_experts, shape.top_k), logits))
            return len(routing[:, : shape.top_k].unique())

        def run() -> tuple[int, int]:
            next(order).bind(rows, 0, 0, [], [area.data_ptr() for area in (x, out, routing)], scratch.data_ptr())()
            return self.num_active * self.expert_bytes, 6 * rows * shape.top_k * shape.size * shape.intermediate

        def step() -> tuple[int, int]:
            self.num_active = choose()
            out.zero_()
            return rates_of(run, self.clock)

        return step

    def one_by_one(self) -> Callable[[], Rates]:
        """One row's experts as linear layers, for 40 choices in turn."""
        shape, runtime = self.shape, self.machine.runtime
        areas = [aligned_rows(1, width) for width in (shape.size, shape.intermediate, shape.size)]
        areas[0].normal_()
        places = [_native.Ref(index, 0, area.stride(0)) for index, area in enumerate(areas)]
        generator, programs = torch.Generator().manual_seed(1), []
        for gate_up, down in itertools.islice(itertools.cycle(self.layers), 40):
            program = _native.Program(runtime.isa, runtime.pool, 1, runtime.native_precision)
            for expert in torch.randperm(shape.num_experts, generator=generator)[: shape.top_k].tolist():
                wide, narrow = gate_up[expert].as_native(), down[expert].as_native()
                program.linear(wide, 0, places[0], _native.Ref(), places[1], Activation.SILU)
                program.linear(narrow, 0, places[1], places[2], places[2], Activation.NONE)
            programs.append(program)
        scratch, order = allocate(max(64, programs[0].scratch_bytes)), itertools.cycle(programs)

        def run() -> tuple[int, int]:
            next(order).bind(1, 0, 0, [], [area.data_ptr() for area in areas], scratch.data_ptr())()
            return shape.top_k * self.expert_bytes, 0

        return lambda: rates_of(run, self.clock)

    def dense(self, rows: int) -> Callable[[], Rates]:
        """A gated MLP of one expert's shape, over as many rows as there are pairs."""
        shape, runtime = self.shape, self.machine.runtime
        pairs = rows * shape.top_k
        gate_up, down = (part[0] for part in self.layers[0])
        widths = (shape.size, shape.intermediate, shape.size)
        areas = [aligned_rows(pairs, width) for width in widths]
        areas[0].normal_()
        places = [_native.Ref(index, 0, area.stride(0)) for index, area in enumerate(areas)]
        program = _native.Program(runtime.isa, runtime.pool, pairs, runtime.native_precision)
        program.linear(gate_up.as_native(), 0, places[0], _native.Ref(), places[1], Activation.SILU)
        program.linear(down.as_native(), 0, places[1], _native.Ref(), places[2], Activation.NONE)
        scratch = allocate(program.scratch_bytes)

        def run() -> tuple[int, int]:
            program.bind(pairs, 0, 0, [], [area.data_ptr() for area in areas], scratch.data_ptr())()
            return 0, 6 * pairs * shape.size * shape.intermediate

        return lambda: rates_of(run, self.clock)


def rates_of(run: Runner, clock: Callable[[], float]) -> Rates:
    """(bytes, operations) a second."""
    started = clock()
    num_bytes, operations = run()
    seconds = clock() - started
    return int(num_bytes / seconds), int(operations / seconds)


def compared(name: str, *measured: Callable[[], int], rounds: int, unit: str) -> None:
    """Measure all in turns. The first is the subject: print its rate and its shares of the others'."""
    rates = [[each() for each in measured] for _ in range(rounds + 1)][1:]  # the first round touches memory
    columns = list(zip(*rates, strict=True))
    middles, bests = [statistics.median(each) for each in columns], [max(each) for each in columns]
    shares = [
        f"{middles[0] / middle:.0%} (best of each {bests[0] / best:.0%})"
        for middle, best in zip(middles[1:], bests[1:], strict=True)
    ]
    print(f"{name}: {middles[0] / 1e9:.1f} {unit}, {' and '.join(shares)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--matmul-precision", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    machine = Machine(arguments.isa, arguments.threads, arguments.matmul_precision)
    torch.set_num_threads(1)  # its other threads would spin on the runs' cores after drawing rows
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    read = machine.limits()[READ]
    print(f"{machine.runtime}; shares of: the read loop and one expert after the other; of a prompt, a dense MLP")
    for name in arguments.shape or SHAPES:
        layer = Layer(SHAPES[name], machine, clock)

        def read_rate() -> int:
            return rates_of(lambda: (read(), 0), clock)[0]

        loop = layer.one_by_one()
        for rows in (1, 16):
            step = layer.runner(rows)
            subjects = (lambda step=step: step()[0], read_rate, lambda loop=loop: loop()[0])
            compared(f"{name}, {rows} rows", *subjects, rounds=arguments.rounds, unit="GB/s")
        step, dense = layer.runner(PROMPT), layer.dense(PROMPT)
        subjects = (lambda step=step: step()[1], lambda dense=dense: dense()[1])
        compared(f"{name}, {PROMPT} rows", *subjects, rounds=max(3, arguments.rounds // 8), unit="GFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
