"""Quantised checkpoints through the device's layers: packed on the device, they say what their weights mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.models.decoder import Decoder
from quire.worker.platform.cuda import CudaPlatform
from quire.worker.platform.weight_offload import tensors_of
from tests.models import test_float_checkpoints as floats
from tests.models import test_quantized_checkpoints as integers
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts, save
from tests.models.test_device_layers import load_device, logits_of
from tests.models.test_quantized_checkpoints import tiny_llama

PROMPTS = random_prompts([6, 3], integers.VOCABULARY)
CASES: dict[str, tuple[Callable[[Path], tuple[Path, Path]], set[torch.dtype]]] = {
    "fp8-block": (lambda path: floats.write_pair(path, floats.FORMATS["fp8-block"]), {torch.uint8}),
    "modelopt-nvfp4": (lambda path: floats.write_pair(path, floats.FORMATS["modelopt-nvfp4"]), {torch.uint8}),
    "gptq-8-bit-rows": (
        lambda path: integers.write_pair(path, tiny_llama(), *integers.FORMATS["gptq-8-bit-rows"]),
        {torch.int8},
    ),
    "gptq-act-order": (
        lambda path: integers.write_pair(path, tiny_llama(), *integers.FORMATS["gptq-act-order"]),
        {torch.uint8, torch.int64},
    ),
}


def check(packed: Path, plain: Path) -> Decoder:
    """The packed model's logits are the plain one's; returns it."""
    _, expected = load(plain)
    _, model = load_device(packed)
    wanted = chunked_logits(PagedRunner(expected), PROMPTS, chunk=13)
    for logits, reference in zip(logits_of(model, PROMPTS), wanted, strict=True):
        assert reference.std() > 0.1
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    write, stored = CASES[name]
    packed, plain = write(tmp_path)
    model = check(packed, plain)
    assert {tensor.dtype for tensor in tensors_of(model)} - {torch.float32} == stored
    assert sum(tensor.nbytes for tensor in tensors_of(model)) >= model.weight_bytes()


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """GPT-OSS: packed experts with biases and a limit, the other matrices as they are."""
    packed, plain = floats.write_gpt_oss(tmp_path)
    model = check(packed, plain)
    assert torch.uint8 in {tensor.dtype for tensor in tensors_of(model)}


def test_rounded_activations(tmp_path: Path) -> None:
    """Near what the weights mean, and the same in any batch: a row's scale is its own.

    Not bit for bit: attention is torch's here, whose sums depend on the processor's BLAS. A row that shared its scale
    would differ by as much as rounding does. (The bits of products are test_weight_formats'.)
    """
    packed, _ = floats.write_pair(tmp_path, floats.FORMATS["fbgemm"])
    _, widened = load_device(packed)
    _, rounding = load_device(packed, rounds_activations=True)
    expected = logits_of(widened, PROMPTS)
    found = logits_of(rounding, PROMPTS)
    for logits, reference in zip(found, expected, strict=True):
        error = (logits - reference).abs().mean() / reference.abs().mean()
        assert 1e-3 < error < 0.3
    alone = logits_of(rounding, PROMPTS[1:])[0]
    assert (alone - found[1]).abs().mean() < 0.1 * (found[1] - expected[1]).abs().mean()


@pytest.mark.parametrize(
    ("quantization", "layout", "asked"),
    [
        (integers.compressed("int-quantized", integers.CHANNEL, integers.TOKEN), "int-quantized", None),
        (integers.FORMATS["gptq-act-order"][0], "gptq-act-order", "w4a8"),
    ],
)
def test_activations_rounded_to_integers(
    quantization: dict[str, Any], layout: str, asked: str | None, tmp_path: Path
) -> None:
    """A device rounds what the CPU's kernels round, and as they do."""
    packed, plain = integers.write_pair(tmp_path, tiny_llama(), quantization, *integers.FORMATS[layout][1:])
    found, native = (
        floats.prompt_logprobs(packed, attention_backend=backend, quantization=asked)
        for backend in ("triton", "native")
    )
    widened = floats.prompt_logprobs(plain, attention_backend="torch")
    rounding = float((native - widened).abs().mean())
    assert rounding > 1e-4
    assert float((found - native).abs().mean()) < 0.1 * rounding


def test_an_engine_rounds_as_its_configuration_says(tmp_path: Path) -> None:
    directory = save(tiny_llama(), tmp_path / "plain")
    found = []
    for asked, precision in (("auto", "fp8"), ("bfloat16", "bfloat16")):
        options = {"quantization": "fp8", "attention_backend": "triton", "dtype": "bfloat16"}
        config = resolve(EngineOptions(model=str(directory), matmul_precision=asked, **options))
        platform = CudaPlatform(config)
        assert f"fp8 weights, bfloat16 KV cache, {precision} products" in platform.describe()
        model = platform.load_model(lambda done, total: None)
        assert isinstance(model, Decoder)
        found.append(logits_of(model, PROMPTS[1:])[0])
    assert not torch.equal(*found)
