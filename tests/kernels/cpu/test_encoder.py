"""Native attention of encoders: against float64, and rows whose bits depend on their own sequence alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.kernels.cpu.test_layers import ISAS, each_isa, run, strided
from tests.kernels.encoder_cases import LENGTHS, bounds, expected, random_qkv, rotations

_native = pytest.importorskip("quire.kernels.cpu._native")

SCALE = 0.3


def attend(
    isa: str,
    qkv: torch.Tensor,
    lengths: list[int],
    num_heads: int,
    window: int | None,
    turn: tuple[torch.Tensor, torch.Tensor] | None = None,
    threads: int = 2,
    precision: str = "FLOAT32",
) -> torch.Tensor:
    width = qkv.shape[1] // 3
    source, out = strided(qkv), strided(torch.full((len(qkv), width), torch.nan))
    table = strided(torch.zeros(len(qkv), 1) if turn is None else torch.cat(turn, dim=1))
    starts, plan = bounds(lengths), _native.EncoderPlan()
    plan.set(len(lengths), starts.data_ptr())

    def record(program, refs):  # type: ignore[no-untyped-def]
        program.attend_encoder(
            num_heads=num_heads,
            head_dim=width // num_heads,
            scale=SCALE,
            window=window or 0,
            rotary_dim=0 if turn is None else 2 * turn[0].shape[1],
            precision=getattr(_native.MatmulPrecision, precision),
            rotation=_native.Ref() if turn is None else refs[1],
            qkv=refs[0],
            out=refs[2],
        )

    run(isa, threads, record, [source, table, out], encoder=plan, precision=precision)
    return out


@each_isa
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "window", "rotates"),
    [(3, 32, None, False), (2, 64, None, True), (2, 8, 5, False), (1, 40, 64, True)],
)
def test_against_float64(isa: str, num_heads: int, head_dim: int, window: int | None, rotates: bool) -> None:
    qkv = random_qkv(LENGTHS, num_heads, head_dim)
    turn = rotations(LENGTHS, head_dim) if rotates else None
    found = attend(isa, qkv, LENGTHS, num_heads, window, turn)
    reference = expected(qkv, LENGTHS, num_heads, SCALE, window, turn)
    assert float((found.double() - reference).abs().max()) < 1e-5
    start_of = bounds(LENGTHS).tolist()
    for (start, end), length in zip(pairwise(start_of), LENGTHS, strict=True):
        own = None if turn is None else (turn[0][start:end], turn[1][start:end])
        alone = attend(isa, qkv[start:end], [length], num_heads, window, own, threads=1)
        assert torch.equal(alone, found[start:end]), "the other sequences have changed a bit"


@pytest.mark.parametrize("isa", [isa for isa in ISAS if _native.has_bf16_products(isa)])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "window", "rotates"),
    [(2, 72, None, True), (1, 80, 64, True), (2, 8, 5, False)],
)
def test_products_of_bfloat16(isa: str, num_heads: int, head_dim: int, window: int | None, rotates: bool) -> None:
    """Sequences shorter and longer than a split of keys, and than an item's rows."""
    lengths = [1, 300, 3, 430]
    qkv = random_qkv(lengths, num_heads, head_dim)
    turn = rotations(lengths, head_dim) if rotates else None
    found = attend(isa, qkv, lengths, num_heads, window, turn, precision="BFLOAT16")
    # Rounded once: the reference rounds nothing but what it is given.
    reference = expected(qkv, lengths, num_heads, SCALE, window, turn)
    error = (found.double() - reference).abs()
    assert 1e-4 < float(error.max()) < 0.1
    assert float(error.mean()) < 3e-3
    start_of = bounds(lengths).tolist()
    for (start, end), length in zip(pairwise(start_of), lengths, strict=True):
        own = None if turn is None else (turn[0][start:end], turn[1][start:end])
        alone = attend(isa, qkv[start:end], [length], num_heads, window, own, 1, "BFLOAT16")
        assert torch.equal(alone, found[start:end]), "the other sequences or the threads have changed a bit"


def test_plans_that_do_not_fit_are_refused() -> None:
    plan = _native.EncoderPlan()
    for starts in (torch.tensor([1, 2]), torch.tensor([0, 5, 4])):
        with pytest.raises(ValueError, match="query starts"):
            plan.set(len(starts) - 1, starts.data_ptr())
    qkv, out = strided(random_qkv([5], 1, 16)), strided(torch.zeros(5, 16))

    def record(program, refs):  # type: ignore[no-untyped-def]
        program.attend_encoder(1, 16, 1.0, 0, 0, _native.MatmulPrecision.FLOAT32, _native.Ref(), refs[0], refs[1])

    shorter = torch.tensor([0, 4])
    plan.set(1, shorter.data_ptr())
    for wrong in (plan, None):
        with pytest.raises(ValueError, match="is not for these rows"):
            run("portable", 1, record, [qkv, out], encoder=wrong)
