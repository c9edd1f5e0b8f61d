"""Frequencies of every scaling equal those of Transformers; the rotation leaves what it should alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.config.hf_json import Fields
from quire.config.rope import RopeDefaults, read_rope
from quire.layers.rotary import RotaryEmbedding, rope_frequencies
from tests.layers.helpers import torch_context

HEAD_DIM = 32
PARTS = RopeDefaults(turns_part=True)
"""Defaults of a family whose config.json may have a part of each head rotated."""
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)]}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "truncate": False, "beta_fast": 20},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, "factor": 2.0, **FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, "attention_factor": 1.3, **FACTORS},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("max_model_len", [200, 1024, 4000])
def test_frequencies_of_a_half_rotated_head(scaling: dict[str, Any], max_model_len: int) -> None:
    parameters = {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, **scaling}
    reference = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=1024, rope_parameters=dict(parameters), partial_rotary_factor=0.5
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, seq_len=max_model_len)
    fields = Fields({"max_position_embeddings": 1024, "rope_parameters": parameters}, "test")
    config = read_rope(fields, HEAD_DIM, PARTS)
    frequencies, factor = rope_frequencies(config, max_model_len)
    assert frequencies.shape == (HEAD_DIM // 4,)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(magnitude)


def rotary(**settings: Any) -> RotaryEmbedding:
    config = read_rope(Fields({"max_position_embeddings": 1024, **settings}, "test"), HEAD_DIM, PARTS)
    return RotaryEmbedding(config, 1024, torch_context())


def test_rotation_by_hand() -> None:
    """Pair (x[i], x[i + d/2]) turns by position * theta ** (-2i / d)."""
    heads = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 900])
    turned = rotary(rope_theta=100.0)(positions).apply(heads)
    half = HEAD_DIM // 2
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = torch.tensor(position * 100.0 ** (-2 * i / HEAD_DIM), dtype=torch.float64)
            pair = torch.complex(heads[token, :, i].double(), heads[token, :, i + half].double())
            expected = pair * torch.polar(torch.tensor(1.0, dtype=torch.float64), angle)
            torch.testing.assert_close(turned[token, :, i].double(), expected.real, rtol=0, atol=3e-4)
            torch.testing.assert_close(turned[token, :, i + half].double(), expected.imag, rtol=0, atol=3e-4)


def test_partial_rotation_keeps_the_rest_of_the_head() -> None:
    heads = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned = rotary(partial_rotary_factor=0.25)(torch.tensor([1, 2, 3])).apply(heads)
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    assert not torch.isclose(turned[..., :8], heads[..., :8]).any(dim=-1).all()
    torch.testing.assert_close(turned[..., :8].norm(dim=-1), heads[..., :8].norm(dim=-1))


def test_a_position_has_one_rotation_whatever_else_is_in_the_step() -> None:
    rope = rotary()
    positions = torch.arange(1000)
    whole = rope(positions)
    for first, last in ((0, 1), (3, 10), (500, 999)):
        part = rope(positions[first:last])
        assert torch.equal(part.cos, whole.cos[first:last])
        assert torch.equal(part.sin, whole.sin[first:last])
