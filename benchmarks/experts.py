"""How near mixtures of experts come to the machine's limits: python -m benchmarks.experts [--rounds 15] [--shape NAME]

One layer's routed experts over random rows, as the engine runs them: of one stream and of sixteen against the bandwidth
of the streaming-read loop of `make bench-kernels` over the bytes of the ACTIVE experts, of a prompt of 1,024 against a
dense gated MLP of the same format that does the same number of products. Each is measured in turns with what it is
compared with. Rows choose experts at random: several layers' worth of weights is kept, so
that what is read comes from memory.
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
from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation, WeightType
from quire.kernels.cpu.memory import Arena, allocate
from quire.kernels.cpu.packing import PackedMatrix
from quire.layers.experts import Routing, route

PROMPT = 1024


@dataclass(frozen=True)
class Shape:
    """Of one layer. type: what the experts are stored in, int4 in groups of 128 with offsets."""

    size: int
    intermediate: int
    num_experts: int
    top_k: int
    type: WeightType


SHAPES = {
    "qwen3-30b-a3b int4": Shape(2048, 768, 128, 8, WeightType.I4),
    "gpt-oss-20b mxfp4": Shape(2880, 2880, 32, 4, WeightType.MXFP4),
}


def random_matrix(shape: Shape, inputs: int, outputs: int, *, gated: bool, arena: Arena) -> PackedMatrix:
    """Random bytes for values and scales: what they say does not matter, but that they are finite."""
    is_integer = shape.type == WeightType.I4
    options = {"group_size": 128, "with_offsets": True} if is_integer else {}
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

    def __init__(self, shape: Shape, machine: Machine, num_layers: int) -> None:
        arena = Arena()
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

    def runner(self, rows: int) -> Callable[[], tuple[int, int]]:
        """Runs one layer over `rows` rows that choose anew; returns (bytes of active experts, products)."""
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
            next(order).run(rows, 0, 0, [], [area.data_ptr() for area in (x, out, routing)], scratch.data_ptr())
            return self.num_active * self.expert_bytes, 6 * rows * shape.top_k * shape.size * shape.intermediate

        def step() -> tuple[int, int]:
            self.num_active = choose()
            out.zero_()
            return timed(run)

        return step

    def dense(self, rows: int) -> Callable[[], tuple[int, int]]:
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
            program.run(pairs, 0, 0, [], [area.data_ptr() for area in areas], scratch.data_ptr())
            return 0, 6 * pairs * shape.size * shape.intermediate

        return lambda: timed(run)


def timed(run: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """(bytes, operations) a second."""
    started = time.perf_counter()
    num_bytes, operations = run()
    seconds = time.perf_counter() - started
    return int(num_bytes / seconds), int(operations / seconds)


def summary(rates: list[int], limits: list[int]) -> str:
    """The best of each, which other processes disturbed least, and the median of the ratios of neighbours."""
    shares = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    return f"{max(rates[1:]) / max(limits[1:]):.0%} of the best (median of turns {statistics.median(shares[1:]):.0%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="auto")
    arguments = parser.parse_args()
    machine = Machine(arguments.isa, arguments.threads)
    read = machine.limits()[READ]
    print(f"{machine.runtime}")
    for name in arguments.shape or SHAPES:
        layer = Layer(SHAPES[name], machine, num_layers=2)
        for rows in (1, 16):
            step, rates, limits = layer.runner(rows), [], []
            for _ in range(arguments.rounds + 1):
                limits.append(timed(lambda: (read(), 0))[0])
                rates.append(step()[0])
            print(f"{name}, {rows} rows: {max(rates) / 1e9:.1f} GB/s, {summary(rates, limits)} bandwidth")
        step, dense, rates, limits = layer.runner(PROMPT), layer.dense(PROMPT), [], []
        for _ in range(max(3, arguments.rounds // 8) + 1):
            limits.append(dense()[1])
            rates.append(step()[1])
        print(f"{name}, {PROMPT} rows: {max(rates) / 1e9:.0f} GFLOP/s, {summary(rates, limits)} rate of a dense MLP")
    return 0


if __name__ == "__main__":
    sys.exit(main())
