"""All families through the device's layers (Triton kernels), with a plain stand-in for the device's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quire.attention.torch_backend import TorchAttention, TorchAttentionStep
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.kernels.arguments import HeadWeights, IndexShape, LatentShape
from quire.kernels.rotation import DeviceRotation, Rotation
from quire.layers.device import DeviceLayers
from quire.models.decoder import Decoder
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from tests.long import one_in
from tests.models.conftest import SavedModel
from tests.models.dense_families import DENSE_FAMILIES, DENSE_SAMPLE
from tests.models.families import FAMILIES
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts
from tests.worker.platform.device_states import DeviceStatePlanner

SavedModels = Callable[[str], SavedModel]


@dataclass
class PlainAttention:
    """The device's attention step by plain torch operators on the host's pages."""

    step: TorchAttentionStep

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None) -> torch.Tensor:
        return self.step.attend(heads, qkv, _plain(rotation, qkv.dtype))

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.step.attend_latent(shape, inputs, _plain(rotation, inputs[0].dtype), selected)

    def select_keys(
        self, shape: IndexShape, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rotation: DeviceRotation
    ) -> torch.Tensor:
        return self.step.select_keys(shape, inputs, _plain(rotation, inputs[0].dtype))


def _plain(rotation: DeviceRotation | None, dtype: torch.dtype) -> Rotation | None:
    if rotation is None:
        return None
    cos, sin = rotation.cos.to(dtype), rotation.sin.to(dtype)
    return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


class DeviceRunner(PagedRunner):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.backend = _Planner(self.backend)
        self.states = DeviceStatePlanner(self.states)


@dataclass
class _Planner:
    backend: TorchAttention

    def plan(self, batch: object) -> PlainAttention:
        return PlainAttention(self.backend.plan(batch))


def load_device(
    directory: Path,
    *,
    dtype: str = "float32",
    batch_invariant: bool = False,
    load_format: str = "auto",
    rounds_activations: bool = False,
) -> tuple[ModelConfig, Decoder]:
    config = load_model_config(str(directory), dtype=dtype, max_model_len=None, revision=None, config_only=False)
    layers = DeviceLayers(torch.device("cpu"), batch_invariant, rounds_activations=rounds_activations)
    return config, load_model(config, LoadConfig(load_format, 0), SINGLE_RANK, device_layers=layers)


def logits_of(model: Decoder, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return chunked_logits(DeviceRunner(model), prompts, chunk=13)


FREQUENCIES_ONLY = ("linear", "dynamic", "yarn", "yarn-attention-factor", "llama3")
"""Families that differ in nothing but the numbers that rotations are made from."""
SAME_LAYERS = (
    "deepseek-v3-yarn",
    "deepseek-v3.2-yarn",
    "deepseek-v3.2-all-read",
    "llama4-llama3-rotation",
    "mistral-no-window",
    "qwen2-window",
    "qwen3-window",
)
"""Families that differ in rotations' numbers, or in windows, which are the attention's, from others here."""
LIBRARY = [name for name in FAMILIES if name.removeprefix("llama-") not in FREQUENCIES_ONLY]
LIBRARY = [name for name in LIBRARY if name in DENSE_SAMPLE or name not in DENSE_FAMILIES]
LIBRARY = [name for name in LIBRARY if name not in SAME_LAYERS]
MUCH_ALIKE = (
    *("gpt2-variant", "opt-bare", "deepseek-v2-one-expert", "deepseek-v3-plain", "llama-wide", "llama-yarn-mscale"),
    *("mixtral-all-experts", "qwen2-moe-renormalised", "qwen3-moe-window", "llama4-interleaved", "qwen3.5-state-last"),
    *(
        "qwen3-next",
        "qwen3.5-vision",
        "qwen3.5",
        "qwen3.5-moe",
        "qwen3.5-two-of-two",
        "deepseek-v2",
        "qwen3-next-few-experts",
    ),
)
"""Families whose layers others have too, in other sizes or order."""
BATCH_INVARIANT = ["gpt2", "opt-350m", "llama-biases", "qwen3"]


@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    [pytest.param(name, False, marks=pytest.mark.long if name in MUCH_ALIKE else ()) for name in LIBRARY]
    + [(name, True) for name in BATCH_INVARIANT],
)
def test_logits_like_transformers(name: str, batch_invariant: bool, saved_model: SavedModels) -> None:
    saved = saved_model(name)
    _, model = load_device(saved.directory, batch_invariant=batch_invariant)
    prompts = random_prompts([1, 9, 6], 97)  # 16 rows: the interpreter takes its time for each tile of rows
    for prompt, logits in zip(prompts, logits_of(model, prompts), strict=True):
        with torch.inference_mode():
            expected = saved.reference(torch.tensor([prompt])).logits[0].float()
        assert expected.std() > 0.5, "logits too flat to compare"
        # A norm behind a delta rule magnifies results near zero.
        tolerance = 5e-4 * max(1.0, float(expected.std()))
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "dtype"), one_in(2, ["gpt2", "qwen3"], ["bfloat16", "float16"]))
def test_half_precision_is_like_the_plain_path(name: str, dtype: str, saved_model: SavedModels) -> None:
    """Not further from float32 than plain torch operators in the same dtype are, and a tenth for luck."""
    saved = saved_model(name)
    (prompt,) = random_prompts([20], 97)
    with torch.inference_mode():
        expected = saved.reference(torch.tensor([prompt])).logits[0].float()
    _, model = load_device(saved.directory, dtype=dtype)
    (logits,) = logits_of(model, [prompt])
    assert logits.dtype == getattr(torch, dtype), "logits are left as the matrix product gives them"
    _, plain = load(saved.directory, dtype=dtype)
    (plain_logits,) = chunked_logits(PagedRunner(plain), [prompt], chunk=13)
    error, plain_error = (logits.float() - expected).abs().mean(), (plain_logits - expected).abs().mean()
    assert 0 < error < 1.1 * plain_error + 1e-4


@pytest.mark.long
def test_batch_invariant_rows_have_the_same_bits_alone_and_in_chunks(saved_model: SavedModels) -> None:
    _, model = load_device(saved_model("llama-biases").directory, batch_invariant=True)
    prompts = random_prompts([19, 3, 30], 97)
    together = chunked_logits(DeviceRunner(model), prompts, chunk=7)
    for prompt, logits in zip(prompts[:2], together, strict=False):
        (alone,) = chunked_logits(DeviceRunner(model), [prompt], chunk=19)
        assert torch.equal(alone, logits)


def test_weights_lie_on_the_device_in_the_dtype_of_the_model(saved_model: SavedModels) -> None:
    """Every one of them, those of norms too; and no second copy is kept of any."""
    _, model = load_device(saved_model("llama-biases").directory, dtype="bfloat16")
    kept = [value for value in reachable(model) if isinstance(value, torch.Tensor)]
    weights = {tensor.data_ptr(): tensor for tensor in kept if tensor.dtype == torch.bfloat16}
    assert sum(tensor.nbytes for tensor in weights.values()) == model.weight_bytes()
    others = [tensor for tensor in kept if tensor.dtype != torch.bfloat16]
    assert all(tensor.dtype == torch.float32 and tensor.numel() == 6 for tensor in others), "frequencies, nothing else"


def test_dummy_weights_fill_every_slot(saved_model: SavedModels) -> None:
    directory = saved_model("qwen3").directory
    (prompt,) = random_prompts([9], 97)
    logits = [logits_of(load_device(directory, load_format="dummy")[1], [prompt])[0] for _ in range(2)]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0


def reachable(root: object) -> list[object]:
    """Everything of ours and of torch that `root` holds, each once."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, list | tuple):
            queue += value
        elif type(value).__module__.startswith("quire."):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            queue += [getattr(value, name) for name in slots if hasattr(value, name)]
            queue += vars(value).values() if hasattr(value, "__dict__") else []
    return list(seen.values())
