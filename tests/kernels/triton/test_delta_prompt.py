"""The gated delta rule of prompts without `batch_invariant`: against float64, and against the kernel that it replaces,
whose pages it must leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.arguments import DeltaRule
from quire.kernels.triton.delta_prompt import LEAST_TOKENS
from quire.kernels.triton.linear_state import gated_delta_rule
from quire.kernels.triton.runtime import recorded_launches
from tests.kernels.triton.helpers import assert_near
from tests.layers.state_steps import (
    HEADS,
    LAYER,
    LENGTHS,
    Inputs,
    Pool,
    delta_inputs,
    delta_rule,
    randn,
    token_by_token,
)
from tests.worker.platform.device_states import on_device

pytestmark = pytest.mark.usefixtures("default_device")

STEPS = [[(0, 0, 127), (1, 0, 1), (2, 0, 5)], [(0, 127, 66), (2, 5, 65)], [(0, 193, 1)], [(0, 194, 6)]]
"""(sequence, first token, tokens). Prompts that begin and end between borders, two in one step, the first in as many
chunks as can be, over an interval's end; before, beside and behind them short pieces and single tokens, for other
kernels, which share their kept rows."""


def in_steps(rule: DeltaRule, inputs: Sequence[Inputs], *, batch_invariant: bool) -> tuple[list[torch.Tensor], Pool]:
    """Results of each sequence, and the pages behind the last step."""
    pool, found = Pool(rule.end_offset), [list[torch.Tensor]() for _ in LENGTHS]
    for work in STEPS:
        parts = [[inputs[each][part][first : first + count] for each, first, count in work] for part in range(2)]
        qkv, gates = (F.pad(torch.cat(part), (0, 0, 0, 3), value=torch.nan) for part in parts)
        step = replace(on_device(pool.step(work), num_seqs=2, num_tokens=3), batch_invariant=batch_invariant)
        out = torch.full((len(qkv), rule.num_value_heads * rule.value_dim), 9.0, dtype=qkv.dtype)
        gated_delta_rule(rule, qkv, gates, out, step)
        assert (out[-3:] == 9.0).all(), "padding is not written"
        for (each, _, _), rows in zip(work, out[:-3].split([count for _, _, count in work]), strict=True):
            found[each].append(rows)
    assert (pool.pages[[4, 6, 0]] == 77).all(), "blocks of other sequences stay as they are"
    assert (pool.pages[:, :64] == 77).all(), "and so do other parts of a page"
    return [torch.cat(rows) for rows in found], pool


@pytest.mark.parametrize("heads", [HEADS[1], pytest.param(HEADS[0], marks=pytest.mark.long)], ids=str)
def test_prompts_in_steps(heads: tuple[int, int, int, int]) -> None:
    rule = delta_rule(heads)
    inputs = [(qkv.bfloat16(), gates.bfloat16()) for qkv, gates in delta_inputs(rule)]
    results, pool = in_steps(rule, inputs, batch_invariant=False)
    for (qkv, gates), actual in zip(inputs, results, strict=True):
        expected = token_by_token(rule, qkv, gates)
        assert expected.abs().max() > 0.01, "results too small to compare"
        assert_near(actual, expected, scale=0.02)
    _, usual = in_steps(rule, inputs, batch_invariant=True)
    pages, expected_pages = (each.pages.view(torch.float32) for each in (pool, usual))
    torch.testing.assert_close(pages, expected_pages, rtol=1e-5, atol=2e-4)


def test_equal_keys_that_are_never_forgotten() -> None:
    """The hardest sums: every token takes back what the one before it wrote, without decay."""
    rule = DeltaRule(1, 1, 16, 16, torch.zeros(1), torch.zeros(1), LAYER, 64)
    qkv, gates = torch.cat((randn(1, 32).expand(150, 32), randn(150, 16, seed=1)), 1), torch.full((150, 2), 9.0)
    qkv, gates, out = qkv.bfloat16(), gates.bfloat16(), torch.empty(150, 16, dtype=torch.bfloat16)
    step = replace(
        on_device(Pool(rule.end_offset).step([(0, 0, 150)]), num_seqs=0, num_tokens=0), batch_invariant=False
    )
    gated_delta_rule(rule, qkv, gates, out, step)
    expected = token_by_token(rule, qkv, gates)
    assert_near(out, expected, scale=0.02)


class Names:
    """Launches nothing."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.names.add(kernel.__name__)


@pytest.mark.parametrize(
    ("count", "dtype", "batch_invariant"),
    [
        (LEAST_TOKENS, torch.bfloat16, False),
        (LEAST_TOKENS - 1, torch.bfloat16, False),
        (200, torch.bfloat16, True),
        (200, torch.float32, False),
    ],
)
def test_prompts_alone_have_these_kernels(count: int, dtype: torch.dtype, batch_invariant: bool) -> None:
    rule, recorder = delta_rule(HEADS[2]), Names()
    qkv, gates = (x.to(dtype) for x in delta_inputs(rule)[0])
    step = on_device(Pool(rule.end_offset).step([(0, 0, count)]), num_seqs=0, num_tokens=0)
    with recorded_launches(recorder):
        out = torch.empty(count, 48, dtype=dtype)
        gated_delta_rule(rule, qkv[:count], gates[:count], out, replace(step, batch_invariant=batch_invariant))
    is_prompt = dtype == torch.bfloat16 and not batch_invariant and count >= LEAST_TOKENS
    assert ({"_chunk_kernel", "_states_kernel"} <= recorder.names) == is_prompt
    assert ("decode_rule_kernel" in recorder.names) != batch_invariant
