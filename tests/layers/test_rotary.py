"""Frequencies of every scaling equal those of Transformers; the rotation leaves what it should alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from quire.config.hf_json import Fields
from quire.config.rope import RopeDefaults, read_rope
from quire.errors import ModelLoadError
from quire.kernels.arguments import RotaryFrequencies
from quire.kernels.cpu.recorder import RecordedIndices, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.device import DeviceOperations
from quire.layers.native import NativeOperations
from quire.layers.operations import TorchOperations
from quire.layers.rotary import RotaryEmbedding, rope_axes, rope_frequencies
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


SECTIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "contiguous": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, {"mrope_section": [4, 7, 5]}),
    "interleaved": (
        Qwen3VLTextConfig,
        Qwen3VLTextRotaryEmbedding,
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    ),
}
AXES = torch.stack((torch.arange(20), torch.arange(20) // 3 + 2, 40 - torch.arange(20)))
"""Of 20 tokens: time, row and column."""


def torch_way(frequencies: RotaryFrequencies, positions: list[torch.Tensor]) -> torch.Tensor:
    turn = TorchOperations().rotation(frequencies, positions[0], positions[1:])
    half = turn.cos.shape[-1] // 2
    return torch.cat((turn.cos[:, 0, :half], turn.sin[:, 0, half:]), dim=1)


def device_way(frequencies: RotaryFrequencies, positions: list[torch.Tensor]) -> torch.Tensor:
    turn = DeviceOperations().rotation(frequencies, positions[0], positions[1:])
    return torch.cat((turn.cos, turn.sin), dim=1)


def native_way(frequencies: RotaryFrequencies, positions: list[torch.Tensor]) -> torch.Tensor:
    recorder = Recorder()
    first, *grid = (RecordedIndices(recorder, number) for number in range(1, 1 + len(positions)))
    turn = NativeOperations().rotation(frequencies, first, grid)
    program = recorder.finish_program(turn, NativeRuntime("auto", 2), len(positions[0]))
    program.run(len(positions[0]), (None, *positions))
    return program.result(len(positions[0])).clone()


@pytest.mark.parametrize("way", [torch_way, native_way, device_way])
@pytest.mark.parametrize("kind", SECTIONS)
def test_three_positions_of_a_token(kind: str, way: Any) -> None:
    """As Transformers rotates tokens of images; with three equal positions, the bits of one."""
    make_config, make_reference, sections = SECTIONS[kind]
    parameters = {"rope_type": "default", "rope_theta": 5000.0, **sections}
    sizes = {"hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "head_dim": HEAD_DIM}
    reference = make_reference(make_config(**sizes, rope_parameters=parameters))
    cos, sin = reference(torch.zeros(1), AXES[:, None])
    expected = torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=1)
    fields = Fields({"max_position_embeddings": 1024, "rope_parameters": parameters}, "test")
    config = read_rope(fields, HEAD_DIM, RopeDefaults())
    frequencies = RotaryFrequencies(rope_frequencies(config, 1024)[0], 1.0, torch.float32, rope_axes(config))
    torch.testing.assert_close(way(frequencies, list(AXES)), expected, rtol=0, atol=2e-6)
    assert torch.equal(way(frequencies, [AXES[0]] * 3), way(frequencies, [AXES[0]]))


@pytest.mark.parametrize("section", [[4, 7, 4], [16], [4, 7, -5], "4", [4.0, 7, 5]])
def test_sections_that_are_no_head(section: Any) -> None:
    fields = Fields({"max_position_embeddings": 64, "rope_parameters": {"mrope_section": section}}, "test")
    with pytest.raises(ModelLoadError, match="mrope_section must be three numbers of elements, 16 together"):
        read_rope(fields, HEAD_DIM, RopeDefaults())
