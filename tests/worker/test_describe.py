"""What the engine says of itself at its start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError
from quire.utils.sizes import format_bytes
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.worker import Worker


@pytest.mark.parametrize(
    ("options", "isa", "expected"),
    [
        (
            {},
            "portable",
            "native kernels for portable, 1 thread, float32 weights, float32 KV cache, float32 products",
        ),
        (
            {"num_threads": 2, "dtype": "bfloat16", "kv_cache_dtype": "int8"},
            "portable",
            "native kernels for portable, 2 threads, bfloat16 weights, int8 KV cache, float32 products",
        ),
        (
            {"quantization": "w8a8"},
            "portable",
            "native kernels for portable, 1 thread, w8a8 weights, float32 KV cache, float32 products",
        ),
        (
            {"dtype": "bfloat16", "matmul_precision": "bfloat16"},
            "bf16_emulated",
            "native kernels for bf16_emulated, 1 thread, bfloat16 weights, bfloat16 KV cache, bfloat16 products",
        ),
        (
            {"attention_backend": "torch"},
            "auto",
            "plain torch operators, 1 thread, float32 weights, float32 KV cache, float32 products",
        ),
    ],
)
def test_what_computes_is_said(
    options: dict[str, object], isa: str, expected: str, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", isa)
    settings = {"model": str(model_path), "num_threads": 1, **options}
    assert CpuPlatform(resolve(EngineOptions.from_keywords(settings))).describe() == expected


def test_weights_of_a_gguf_file_are_called_so(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    config = resolve(EngineOptions(model=str(model_path), num_threads=1))
    model = replace(config.model, path=Path("model.gguf"), kv_cache_dtype="bfloat16", activation_bits=8)
    said = "1 thread, the GGUF file's weights, bfloat16 KV cache (the default for GGUF files), float32 products"
    bits = ", 8 bits of activations that meet quantised weights"
    assert f"{said}{bits}" in CpuPlatform(replace(config, model=model)).describe()


def test_the_bytes_of_weights_are_said_when_they_are_loaded(model_path: Path, reference: PreTrainedModel) -> None:
    config = resolve(EngineOptions(model=str(model_path), num_threads=1, attention_backend="torch"))
    worker = Worker(config, CpuPlatform(config))
    before = worker.describe_backend()
    worker.load_model()
    num_bytes = sum(each.nbytes for each in reference.parameters())
    assert worker.describe_backend() == f"{before}, {format_bytes(num_bytes)} of weights"


def test_an_instruction_set_that_is_not_there(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx1024")
    config = resolve(EngineOptions(model=str(model_path), num_threads=1))
    with pytest.raises(Exception, match=r"QUIRE_CPU_ISA: 'avx1024' is not among .*portable"):
        CpuPlatform(config)


@pytest.mark.parametrize(
    ("isa", "products"),
    [
        ("bf16_emulated", "bfloat16 products (bf16_emulated is an emulation, for tests)"),
        ("portable", "float32 products"),
    ],
)
def test_precision_for_weights_that_are_stored_in_bfloat16(
    isa: str, products: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told, an emulation uses what it emulates, and other instruction sets what they can do. Where there
    was a choice, its reason is said."""
    monkeypatch.setenv("QUIRE_CPU_ISA", isa)
    raw = json.loads((model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    config = resolve(EngineOptions(model=str(tmp_path), num_threads=1))
    assert CpuPlatform(config).describe().endswith(f", {products}")


def test_an_instruction_set_that_cannot_multiply_bfloat16(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    options = EngineOptions(model=str(model_path), num_threads=1, dtype="bfloat16", matmul_precision="bfloat16")
    with pytest.raises(
        ConfigError, match="needs a CPU with AVX512-BF16 or AMX: portable cannot multiply bfloat16"
    ) as caught:
        CpuPlatform(resolve(options))
    assert caught.value.param == "matmul_precision"


def test_quantised_weights_are_multiplied_in_bfloat16_on_tiles_alone(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "bf16_emulated")
    options = EngineOptions(model=str(model_path), num_threads=1, quantization="int8", matmul_precision="bfloat16")
    with pytest.raises(ConfigError, match="would change nothing: bf16_emulated leaves activations") as caught:
        CpuPlatform(resolve(options))
    assert caught.value.param == "matmul_precision"
