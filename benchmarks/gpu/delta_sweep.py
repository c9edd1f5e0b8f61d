"""Tiles of the gated delta rule's prompts: python -m benchmarks.gpu.delta_sweep --out FILE [--tiny]

Qwen3-Next's shape; every kernel alone. `difference` and `state difference` are relative errors (norms, from float64) of
results and last states, `rounding` what the results' dtype costs alone. `python -m tests.kernels.triton.ahead_of_time
90 delta cache` compiles every kernel before. --tiny: a small shape in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import records
from benchmarks.gpu.records import Record
from benchmarks.gpu.timing import Call, measure
from quire.attention.device_batch import DeviceBatch, DeviceStateStep
from quire.kernels.arguments import NORM_EPSILON, DeltaRule
from quire.kernels.triton.delta_prompt import TILES, PromptTiles, prompt_rule
from quire.kernels.triton.linear_state import gated_delta_rule, rule_parts
from quire.kernels.triton.runtime import launch, recorded_launches

HEADS, TINY_HEADS = (16, 32, 128, 128), (1, 2, 16, 16)
"""Key heads, value heads, elements of a key, elements of a value."""
BATCHES, TINY_BATCHES = ((1, 8192), (8, 1024)), ((2, 75),)
"""Sequences, tokens of each."""
CUT, TINY_CUT = 70, 5
"""First tokens of each sequence that a step of their own computes, where results of two steps are checked."""
INTERVAL, TABLE_WIDTH = 1024, 8
VARIANTS: Mapping[str, PromptTiles] = {
    "present": TILES,
    "chunks: 8 warps": replace(TILES, chunk_warps=8),
    "chunks: 168 registers": replace(TILES, chunk_registers=168),
    "states: 16 columns": replace(TILES, columns=16),
    "states: 8 warps": replace(TILES, state_warps=8),
    "states: 2 stages": replace(TILES, num_stages=2),
    "states: 64 columns, 8 warps": replace(TILES, columns=64, state_warps=8, num_stages=2),
}


class Launches:
    """Launches nothing. calls: by kernel, its last launch."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.calls[kernel.__name__] = partial(launch, kernel, grid, *args, **constants)

    @classmethod
    def of(cls, call: Callable[[], object]) -> Launches:
        found = cls()
        with recorded_launches(found):
            call()
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of equal lengths, from their first tokens on. decays: as the rule's first kernel computes them."""

    rule: DeltaRule
    qkv: torch.Tensor
    gates: torch.Tensor
    decays: torch.Tensor
    out: torch.Tensor
    states: DeviceStateStep

    @classmethod
    def build(
        cls, heads: tuple[int, int, int, int], batch: tuple[int, int], device: torch.device, *, is_dry: bool = False
    ) -> Case:
        """is_dry: to compile, not to run: memory of any content."""
        num_seqs, count = batch
        new = torch.empty if is_dry else torch.randn
        num_value_heads = heads[1]
        # From heads that hardly forget to those that forget within a few tokens, as models have them.
        rate = torch.logspace(-3, 1, num_value_heads, device=device)
        rule = DeltaRule(*heads, rate, torch.zeros(num_value_heads, device=device), 0, 0)
        width = 2 * heads[0] * heads[2] + num_value_heads * heads[3]
        total = num_seqs * count
        qkv = new(total, width, device=device, dtype=torch.bfloat16)
        gates = new(total, 2 * num_value_heads, device=device, dtype=torch.bfloat16)
        out = torch.empty(total, num_value_heads * heads[3], device=device, dtype=torch.bfloat16)
        decays = torch.empty(total, num_value_heads, device=device)
        if not is_dry:
            gate = gates[:, num_value_heads:].double() + rule.time_bias
            decays = (-rate.double() * torch.nn.functional.softplus(gate)).float()
        return cls(rule, qkv, gates, decays, out, prompts(rule, num_seqs, count, device))

    def usual(self, *, batch_invariant: bool) -> None:
        """The engine's kernels."""
        states = replace(self.states, batch_invariant=batch_invariant)
        gated_delta_rule(self.rule, self.qkv, self.gates, self.out, states)

    def prompt(self, tiles: PromptTiles) -> None:
        tensors = self.qkv, self.gates, self.out, self.decays
        prompt_rule(self.rule, tensors, rule_parts(self.rule, self.states), self.states, tiles)

    def in_two_steps(self, cut: int) -> torch.Tensor:
        """Results with the first tokens of each sequence in a step of their own, in the engine's kernels."""
        num_seqs = self.states.batch.num_seqs
        results = []
        for start, end in ((0, cut), (cut, self.count)):
            inputs = [x.view(num_seqs, self.count, -1)[:, start:end].flatten(0, 1) for x in (self.qkv, self.gates)]
            out = torch.empty(num_seqs * (end - start), self.out.shape[1], device=self.out.device, dtype=self.out.dtype)
            step = prompts(self.rule, num_seqs, end - start, self.out.device, start=start)
            states = replace(step, pages=self.states.pages, tables=self.states.tables)
            gated_delta_rule(self.rule, *inputs, out, states)
            results.append(out.view(num_seqs, end - start, -1))
        return torch.cat(results, 1).flatten(0, 1)

    @property
    def count(self) -> int:
        return self.states.batch.max_query_len

    def last_states(self) -> torch.Tensor:
        """[sequences, value heads, key_dim, value_dim]."""
        part, last = self.rule.state, (self.count - 1) // INTERVAL
        floats = self.states.floats(0)[self.states.tables[0][:, last].long()]
        size = part.shape[0] * part.shape[1] * part.shape[2]
        return floats[:, part.offset // 4 :][:, :size].unflatten(1, part.shape)[..., : self.rule.value_dim]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and states at the last border, in float64, token by token."""
        rule, num_seqs = self.rule, self.states.batch.num_seqs
        width, group = rule.num_key_heads * rule.key_dim, rule.num_value_heads // rule.num_key_heads
        qkv, gates = (x.double().view(num_seqs, self.count, -1) for x in (self.qkv, self.gates))
        query, key = (x.unflatten(2, (-1, rule.key_dim)) for x in qkv[..., : 2 * width].chunk(2, 2))
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (query, key))
        query, key = (x.repeat_interleave(group, 2) for x in (query * rule.key_dim**-0.5, key))
        value = qkv[..., 2 * width :].unflatten(2, (-1, rule.value_dim))
        left, beta = self.decays.double().exp().view(num_seqs, self.count, -1), gates.chunk(2, 2)[0].sigmoid()
        state = torch.zeros(num_seqs, rule.num_value_heads, rule.key_dim, rule.value_dim).to(qkv)
        out, kept = torch.empty_like(value), state
        for at in range(self.count):
            state = state * left[:, at, :, None, None]
            known = torch.einsum("shkv,shk->shv", state, key[:, at])
            update = (value[:, at] - known) * beta[:, at, :, None]
            state = state + key[:, at, ..., None] * update[:, :, None]
            out[:, at] = torch.einsum("shkv,shk->shv", state, query[:, at])
            kept = state if (at + 1) % 64 == 0 else kept
        return out.flatten(0, 1).flatten(1), kept


def prompts(rule: DeltaRule, num_seqs: int, count: int, device: torch.device, *, start: int = 0) -> DeviceStateStep:
    """Step of `count` tokens of each sequence."""
    total, blocks = num_seqs * count, -(-(start + count) // INTERVAL)
    numbers = torch.arange(num_seqs + 1, device=device, dtype=torch.int32)
    positions = torch.zeros(total, device=device, dtype=torch.int64)
    batch = DeviceBatch(
        num_seqs,
        total,
        count,
        start + count,
        numbers[:-1].clone(),
        numbers * count,
        torch.full((num_seqs,), start + count, device=device, dtype=torch.int32),
        positions,
        (),
        (),
    )
    table = torch.zeros(num_seqs, TABLE_WIDTH, device=device, dtype=torch.int32)
    table[:, :blocks] = torch.arange(num_seqs * blocks, device=device, dtype=torch.int32).view(num_seqs, blocks)
    pages = torch.empty(num_seqs * blocks, rule.end_offset, device=device, dtype=torch.uint8)
    return DeviceStateStep(batch, {0: table}, INTERVAL, {0: pages}, batch_invariant=False)


def measured(case: Case, device: torch.device, variants: Mapping[str, PromptTiles], cut: int) -> Iterator[Record]:
    """A record for the present kernels, each batch-invariant one, and each variant."""
    base: Record = {"part": "delta sweep", "what": "delta rule"}
    base |= {"sequences": case.states.batch.num_seqs, "tokens": case.count}
    expected, last = case.exact()
    rounding = relative(expected.to(case.out.dtype), expected)
    ways: dict[str, Callable[[], None]] = {
        "engine": partial(case.usual, batch_invariant=False),
        "batch-invariant": partial(case.usual, batch_invariant=True),
        **{name: partial(case.prompt, tiles) for name, tiles in variants.items()},
    }
    for name, way in ways.items():
        record = {**base, "variant": name, "rounding": rounding}
        try:
            case.out.fill_(float("nan"))
            for page in case.states.pages.values():
                page.fill_(255)  # NaN
            way()
            record |= {
                "difference": relative(case.out, expected),
                "state difference": relative(case.last_states(), last),
            }
            record["seconds"] = measure([way], device).median
            kernels = Launches.of(way).calls
            record["kernels"] = {kernel: measure([call], device).median for kernel, call in kernels.items()}
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield record
    try:
        yield {**base, "variant": "engine, in two steps", "difference": relative(case.in_two_steps(cut), expected)}
    except Exception as error:
        yield {**base, "variant": "engine, in two steps", "error": f"{type(error).__name__}: {str(error)[:300]}"}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def dry_calls() -> Iterator[Call]:
    """Each kernel once, to compile it ahead."""
    case = Case.build(HEADS, BATCHES[0], torch.device("cpu"), is_dry=True)
    for batch_invariant in (False, True):
        yield partial(case.usual, batch_invariant=batch_invariant)
    for tiles in VARIANTS.values():
        yield partial(case.prompt, tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit, tiny = records.writer(arguments.out), arguments.tiny
    device = torch.device("cpu" if tiny else "cuda")
    with torch.inference_mode():
        for batch in TINY_BATCHES if tiny else BATCHES:
            torch.manual_seed(0)
            case = Case.build(TINY_HEADS if tiny else HEADS, batch, device)
            for record in measured(case, device, {} if tiny else VARIANTS, TINY_CUT if tiny else CUT):
                emit(record)


if __name__ == "__main__":
    main()
