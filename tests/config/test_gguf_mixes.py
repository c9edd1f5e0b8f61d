"""Types by tensor and mix, as llama.cpp's tool gives them."""

from __future__ import annotations

import pytest

from quire.config.gguf_mixes import MIXES, MixedModel, tensor_type

SMALL = MixedModel(num_layers=18, heads_per_key=4, is_tied=True, is_large=False, has_importance=False)
BIG = MixedModel(num_layers=32, heads_per_key=2, is_tied=False, is_large=False, has_importance=False)
MORE_OF_18 = {0, 1, 4, 7, 10, 13, 15, 16, 17}
"""Layers with more bits, of 18: those that published files of Gemma 3 270M have so."""
MORE_OF_32 = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}


@pytest.mark.parametrize(("model", "layers"), [(SMALL, MORE_OF_18), (BIG, MORE_OF_32)])
@pytest.mark.parametrize(("mix", "usual"), [("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")])
@pytest.mark.parametrize("own", ["attn_v", "ffn_down"])
def test_some_layers_have_more_bits(model: MixedModel, layers: set[int], mix: str, usual: str, own: str) -> None:
    found = [tensor_type(f"blk.{layer}.{own}.weight", (256, 512), mix, model) for layer in range(model.num_layers)]
    assert {layer for layer, kind in enumerate(found) if kind == "Q6_K"} == layers
    assert set(found) == {usual, "Q6_K"}


@pytest.mark.parametrize(
    ("name", "mix", "model", "columns", "expected"),
    [
        ("blk.3.attn_q.weight", "q4_k_m", BIG, 512, "Q4_K"),
        ("blk.3.attn_q.weight", "q4_k_m", BIG, 640, "Q5_0"),
        ("blk.3.attn_q.weight", "q5_k_m", BIG, 640, "Q5_1"),
        ("blk.3.attn_q.weight", "q6_k", BIG, 640, "Q8_0"),
        ("blk.3.attn_q.weight", "iq4_xs", BIG, 640, "IQ4_NL"),
        ("blk.3.attn_q.weight", "q8_0", BIG, 640, "Q8_0"),
        ("blk.0.attn_v.weight", "q4_k_m", BIG, 640, "Q8_0"),
        ("blk.3.attn_q.weight", "q4_k_m", BIG, 100, "F16"),
        ("blk.3.attn_q.weight", "f32", BIG, 100, "F32"),
        ("blk.3.attn_q.weight", "bf16", BIG, 512, "BF16"),
        ("blk.3.attn_norm.weight", "q4_k_m", BIG, 0, "F32"),
        ("token_embd.weight", "q4_k_m", BIG, 512, "Q4_K"),
        ("token_embd.weight", "q4_k_m", SMALL, 512, "Q6_K"),
        ("token_embd.weight", "q4_k_m", SMALL, 640, "Q8_0"),
        ("token_embd.weight", "q8_0", SMALL, 512, "Q8_0"),
        ("output.weight", "iq4_xs", BIG, 512, "Q6_K"),
        ("output.weight", "q8_0", BIG, 512, "Q8_0"),
        ("blk.9.attn_v.weight", "iq4_xs", SMALL, 512, "Q5_K"),
        ("blk.9.attn_v.weight", "iq4_xs", BIG, 512, "IQ4_XS"),
        ("blk.3.ffn_down.weight", "iq4_xs", BIG, 512, "Q5_K"),
        ("blk.4.ffn_down.weight", "iq4_xs", BIG, 512, "IQ4_XS"),
    ],
)
def test_a_tensor_has_the_type_of_its_mix(name: str, mix: str, model: MixedModel, columns: int, expected: str) -> None:
    shape = (64, columns) if columns else (64,)
    assert tensor_type(name, shape, mix, model) == expected


def test_what_is_known_of_the_columns_and_the_size_change_the_mix() -> None:
    known = MixedModel(32, 2, False, False, has_importance=True)
    assert tensor_type("blk.0.ffn_down.weight", (64, 512), "iq4_xs", known) == "IQ4_XS"
    large = MixedModel(80, 8, False, is_large=True, has_importance=False)
    kinds = {tensor_type(f"blk.{layer}.attn_v.weight", (64, 512), "q4_k_m", large) for layer in range(80)}
    assert kinds == {"Q5_K", "Q6_K"}


def test_few_experts_leave_room_for_attention() -> None:
    model = MixedModel(32, 4, False, False, False, num_experts=8)
    found = [
        tensor_type(f"blk.9.{own}.weight", (64, 512), mix, model)
        for mix in ("q4_k_m", "q6_k", "iq4_xs")
        for own in ("attn_v", "attn_k", "attn_output", "attn_q", "ffn_gate_inp")
    ]
    assert found == [
        *("Q8_0", "Q8_0", "Q5_K", "Q4_K", "F32"),
        *("Q8_0", "Q8_0", "Q6_K", "Q6_K", "F32"),
        *("Q8_0", "Q8_0", "Q5_K", "IQ4_XS", "F32"),
    ]
    stacks = {tensor_type(f"blk.{layer}.ffn_down_exps.weight", (8, 64, 512), "q4_k_m", model) for layer in (0, 8)}
    assert stacks == {"Q6_K", "Q4_K"}


def test_file_types_have_llama_cpps_numbers() -> None:
    numbers = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "q8_0": 7, "iq4_xs": 30, "bf16": 32, "f16": 1, "f32": 0}
    assert {name: mix.number for name, mix in MIXES.items()} == numbers
