"""The gated delta rule, over states that lie in pages as the KV cache keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.kernels.cases import DELTA_HEADS, Case
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import Prepared
from benchmarks.kernels.subjects.machine import Machine, aligned_rows, relative_error
from quire.attention.interface import StateStep
from quire.kernels.arguments import DeltaRule
from quire.kernels.cpu.linear_state import StatePlans
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import Recorder
from quire.layers.native import NativeOperations
from quire.layers.states import gated_delta_rule

TOLERANCE = 1e-4
COMPUTED = 96
"""Tokens of a sequence before the token that a decode computes: half of what lies between two borders is kept."""
INTERVAL = 1 << 20


class DeltaSubject:
    """Prompts from their start, or one token for each of `rows` sequences, whose states come from memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        heads = DELTA_HEADS[1]
        self._rule = DeltaRule(*DELTA_HEADS, torch.rand(heads), torch.randn(heads), 0, 0)

    def memory_bytes(self, case: Case) -> int:
        return self._num_states(case) * self._rule.end_offset + 8 * case.rows * 4 * self._rule.end_offset // 1024

    def prepare(self, case: Case) -> Prepared:
        rule, is_prompt = self._rule, case.shape == "delta-prompt"
        width = 2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim
        qkv, gates = aligned_rows(case.rows, width), aligned_rows(case.rows, 2 * rule.num_value_heads)
        qkv.copy_(torch.randn(case.rows, width))
        gates.copy_(torch.randn(case.rows, 2 * rule.num_value_heads))
        num_states = self._num_states(case)
        pages = allocate(num_states * rule.end_offset).view(num_states, rule.end_offset)
        pages.view(torch.float32).normal_(0.0, 0.1)
        sequences = 1 if is_prompt else case.rows
        starts = torch.full((sequences,), 0 if is_prompt else COMPUTED)
        bounds = [0, case.rows] if is_prompt else list(range(case.rows + 1))
        steps = []
        for first in range(0, num_states - sequences + 1, sequences):
            table = torch.arange(first, first + sequences, dtype=torch.int32)[:, None]
            steps.append(StateStep(bounds, starts, {0: table}, INTERVAL, {0: pages}))
        rule.decays.blocks(steps[0]).abs_().neg_()  # a state does not grow by itself
        run, result = self._native(qkv, gates, steps)
        last = StateStep(bounds, starts, steps[-1].tables, INTERVAL, {0: pages.clone()})
        expected = gated_delta_rule(rule, qkv, gates, last)

        def plain() -> int:
            gated_delta_rule(rule, qkv, gates, last)
            return 1

        run()  # a step writes the rows that it wrote before: every run reads the same states
        error = relative_error(result, expected)
        twins: dict[str, Runner] = {"f32": plain}
        return Prepared(natives={"f32": run}, twins=twins, errors={"f32": error}, tolerances={"f32": TOLERANCE})

    def _num_states(self, case: Case) -> int:
        return 1 if case.shape == "delta-prompt" else max(case.rows, self._machine.num_copies(self._rule.end_offset))

    def _native(
        self, qkv: torch.Tensor, gates: torch.Tensor, steps: Sequence[StateStep]
    ) -> tuple[Runner, torch.Tensor]:
        recorder = Recorder()
        wide, narrow = (recorder.external(each.shape[1], each.stride(0)) for each in (qkv, gates))
        result = NativeOperations().gated_delta_rule(self._rule, wide, narrow, None)
        program = recorder.finish_program(result, self._machine.runtime, len(qkv))
        planned = []
        for step in steps:
            plans = StatePlans(recorder.state_layers)
            planned.append((plans, plans.set(step)))

        def run() -> int:
            for _, plan in planned:
                program.run(len(qkv), externals=[qkv, gates], states=plan)
            return len(planned)

        return run, program.result(len(qkv))
