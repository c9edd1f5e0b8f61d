"""choose_execution: a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.device import DeviceConfig
from quire.worker.graph_dispatch import Execution, ExecutionSettings, choose_execution, execution_settings

BOTH = ExecutionSettings(full_sizes=(1, 4, 8), piecewise_sizes=(1, 4, 8, 16, 64))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ((1, 1, 1), Execution("full", 1, 1)),
        ((3, 3, 1), Execution("full", 4, 4)),
        ((8, 8, 1), Execution("full", 8, 8)),
        ((9, 9, 1), Execution("piecewise", 16, 9)),  # more sequences than any full graph has
        ((9, 8, 2), Execution("piecewise", 16, 8)),
        ((2, 1, 2), Execution("piecewise", 4, 1)),
        ((64, 3, 40), Execution("piecewise", 64, 3)),
        ((65, 3, 40), Execution("eager", 65, 3)),
    ],
)
def test_both_kinds(step: tuple[int, int, int], expected: Execution) -> None:
    assert choose_execution(*step, BOTH) == expected


@pytest.mark.parametrize(
    ("step", "is_decode", "expected"),
    [
        ((3, 3, 1), True, Execution("full", 4, 4)),
        ((5, 2, 4), True, Execution("full", 16, 4)),
        ((32, 8, 4), True, Execution("full", 32, 8)),
        ((5, 2, 3), True, Execution("full", 16, 4)),  # fewer drafts than there may be
        ((5, 2, 4), False, Execution("piecewise", 8, 2)),  # a prompt
        ((5, 1, 5), True, Execution("piecewise", 8, 1)),
        ((33, 9, 4), True, Execution("piecewise", 64, 9)),
        ((40, 30, 4), True, Execution("piecewise", 64, 30)),  # a full graph of 128 tokens and more
    ],
)
def test_sequences_with_drafts(step: tuple[int, int, int], is_decode: bool, expected: Execution) -> None:
    """One graph for each number of sequences, of as many rows as a sequence may have."""
    settings = ExecutionSettings(full_sizes=(1, 4, 8, 64), piecewise_sizes=(1, 4, 8, 16, 64), draft_rows=4)
    assert choose_execution(*step, settings, is_decode=is_decode) == expected
    assert choose_execution(*step, replace(settings, draft_rows=0), is_decode=is_decode).num_tokens < 128


def test_what_is_captured() -> None:
    settings = ExecutionSettings(full_sizes=(2, 100), piecewise_sizes=(8, 9), draft_rows=3)
    assert settings.executions() == [
        Execution("piecewise", 9, 1),
        Execution("piecewise", 8, 1),
        Execution("full", 100, 100),
        Execution("full", 2, 2),
        Execution("full", 6, 2),
    ]
    assert Execution("piecewise", 9, 5).captured_as == settings.executions()[0]
    assert Execution("full", 6, 2).captured_as == settings.executions()[-1]


def test_one_kind_or_none() -> None:
    full, piecewise = ExecutionSettings(full_sizes=(4,)), ExecutionSettings(piecewise_sizes=(4,))
    assert choose_execution(3, 3, 1, full) == Execution("full", 4, 4)
    assert choose_execution(3, 1, 3, full) == Execution("eager", 3, 1)
    assert choose_execution(3, 3, 1, piecewise) == Execution("piecewise", 4, 3)
    assert choose_execution(3, 3, 1, ExecutionSettings()) == Execution("eager", 3, 3)


@pytest.mark.parametrize(
    ("kind", "full", "piecewise"),
    [
        ("none", (), ()),
        ("full", (1, 4), ()),
        ("piecewise", (), (1, 4, 16)),
        ("full_and_piecewise", (1, 4), (1, 4, 16)),
    ],
)
def test_settings(kind: str, full: tuple[int, ...], piecewise: tuple[int, ...]) -> None:
    """No full graph has more sequences than there are rows."""
    sizes = () if kind == "none" else (1, 4, 16)
    device = DeviceConfig("cuda", 1, "triton", cuda_graphs=kind, cuda_graph_sizes=sizes)
    assert execution_settings(device, 5, 0) == ExecutionSettings(full, piecewise)
    assert execution_settings(device, 5, 3) == ExecutionSettings(full, piecewise, 4)
