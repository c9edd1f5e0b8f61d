"""Bytes and operations of the cases, worked out by hand, and which of them are chosen."""

from __future__ import annotations

import pytest

from benchmarks.kernels.cases import (
    KERNELS,
    LINEAR_TYPES,
    MODELS,
    QUICK,
    Matrix,
    Selection,
    Work,
    every_case,
    matrices,
    select,
)
from quire.errors import UserError
from tests.benchmarks.kernels.builders import TINY

SMALL = MODELS[0]


def test_matrices_of_a_model() -> None:
    assert matrices(SMALL) == {
        "qkv": Matrix((9 + 3 + 3) * 64, 576),
        "o": Matrix(576, 576),
        "gate_up": Matrix(3072, 576, gated=True),
        "down": Matrix(576, 1536),
        "lm_head": Matrix(49152, 576),
    }


def test_bytes_of_each_type() -> None:
    """64 rows of 192: scales of a row, or of 3 groups of 64 with as many offsets."""
    sizes = {name: kind.weight_bytes(Matrix(64, 192)) for name, kind in LINEAR_TYPES.items()}
    count = 64 * 192
    assert sizes == {
        "f32": 4 * count,
        "bf16": 2 * count,
        "f16": 2 * count,
        "w16a16": 2 * count,
        "int8": count + 64 * 4,
        "w8a8": count + 64 * 4,
        "int4": count // 2 + 64 * 3 * 8,
        "w4a8": count // 2 + 64 * 3 * 8,
        "fp8": count + 64 * 4,
        "mxfp4": count // 2 + 64 * 6,
    }


def test_work_of_a_product() -> None:
    (case,) = [case for case in KERNELS["linear"](TINY) if (case.shape, case.rows) == ("down", 8)]
    assert case.variants["bf16"] == Work(bytes=2 * 96 * 160, float_operations=2 * 8 * 96 * 160)
    assert case.variants["w16a16"] == Work(bytes=2 * 96 * 160, bf16_operations=2 * 8 * 96 * 160)
    assert case.variants["w8a8"] == Work(bytes=96 * 160 + 96 * 4, integer_operations=2 * 8 * 96 * 160)


def test_work_of_attention() -> None:
    """2 key heads of 16; 4 query heads: 2 products of 16 multiplications and additions with each key."""
    (decode,) = [case for case in KERNELS["decode"](TINY) if (case.shape, case.rows) == ("1024", 8)]
    tokens, head_work = 8 * 1024, 2 * 2 * 16 * 4
    assert decode.variants == {
        "f32": Work(tokens * 2 * 2 * 16 * 4, tokens * head_work),
        "bf16": Work(tokens * 2 * 2 * 16 * 2, tokens * head_work),
        "bf16a16": Work(tokens * 2 * 2 * 16 * 2, bf16_operations=tokens * head_work),
        "int8": Work(tokens * 2 * 2 * (16 + 4), tokens * head_work),
        "fp8": Work(tokens * 2 * 2 * 16, tokens * head_work),
    }
    (prefill,) = [case for case in KERNELS["prefill"](TINY) if case.rows == 512]
    assert prefill.variants["f32"].float_operations == sum(range(1, 513)) * head_work


def test_work_of_the_small_kernels() -> None:
    work = {
        (case.kernel, name): work
        for kernel in ("write", "copy", "norm", "barrier", "rotation", "embed", "choose", "logprobs")
        for case in KERNELS[kernel](TINY)
        for name, work in case.variants.items()
        if case.rows == 1
    }
    token = 2 * 2 * 16
    assert work["write", "bf16"] == Work((2 * 4 + 3 * 2) * 16 * 4 + token * 2)
    assert work["copy", "f32"] == Work(2 * 16 * token * 4)
    assert work["norm", "f32"] == Work(2 * 96 * 4, 4 * 96)
    assert work["barrier", "f32"] == Work((2 * 8 + 4) * 2 * 16 * 4)
    assert work["rotation", "f32"] == Work(16 * 4)
    assert work["embed", "bf16"] == Work(96 * (2 + 4))
    assert work["choose", "f32"] == work["logprobs", "f32"] == Work(200 * 4)


def test_logits_are_not_computed_for_whole_prompts() -> None:
    assert {case.rows for case in every_case() if case.shape == "lm_head"} == {1, 2, 4, 8, 16, 32, 128}
    assert {case.rows for case in every_case() if case.shape == "qkv" and case.kernel == "linear"} == {
        1, 2, 4, 8, 16, 32, 128, 512, 2048,
    }  # fmt: skip


def test_selection_by_every_option() -> None:
    chosen = select(Selection(("linear", "decode"), ("135M", "8B"), ("qkv", "4096"), (1, 8), ("bf16", "w8a8")))
    assert [(case.kernel, case.model.name, case.shape, case.rows, list(case.variants)) for case in chosen] == [
        ("linear", "135M", "qkv", 1, ["bf16", "w8a8"]),
        ("linear", "135M", "qkv", 8, ["bf16", "w8a8"]),
        ("linear", "8B", "qkv", 1, ["bf16", "w8a8"]),
        ("linear", "8B", "qkv", 8, ["bf16", "w8a8"]),
        ("decode", "135M", "4096", 1, ["bf16"]),
        ("decode", "135M", "4096", 8, ["bf16"]),
        ("decode", "8B", "4096", 1, ["bf16"]),
        ("decode", "8B", "4096", 8, ["bf16"]),
    ]


def test_what_models_share_is_one_case() -> None:
    """0.6B and 1.7B have the same heads; all but the smallest the same vocabulary. Their matrices differ."""
    models = {
        kernel: [case.model.name for case in select(Selection(kernels=(kernel,), rows=(1,), shapes=shapes))]
        for kernel, shapes in (("decode", ("256",)), ("choose", ("greedy",)), ("linear", ("o",)))
    }
    assert models == {
        "decode": ["135M", "0.6B", "8B"],
        "choose": ["135M", "0.6B"],
        "linear": ["135M", "0.6B", "1.7B", "8B"],
    }


def test_the_quick_choice_is_small_and_has_every_target() -> None:
    chosen = select(QUICK)
    assert len(chosen) <= 50
    assert {case.kernel for case in chosen} >= {"linear", "decode", "prefill", "norm", "barrier", "choose"}
    assert {case.rows for case in chosen if case.kernel == "linear"} == {1, 8, 128, 512}


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(kernels=("linaer",)), "did you mean 'linear'"),
        (Selection(models=("7B",)), "known: 135M, 0.6B, 1.7B, 8B"),
        (Selection(shapes=("gate",)), "'gate'"),
        (Selection(rows=(3,)), "--rows: '3'"),
        (Selection(types=("fp6",)), "--types: 'fp6'"),
        (Selection(kernels=("norm",), types=("int4",)), "together"),
    ],
)
def test_what_does_not_exist_is_an_error(selection: Selection, message: str) -> None:
    with pytest.raises(UserError, match=message):
        select(selection)
