"""What the engine says of itself at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.worker.worker import Worker


@pytest.mark.parametrize(
    ("options", "isa", "expected"),
    [
        ({}, "portable", "native kernels for portable, 1 thread, float32 weights, float32 KV cache"),
        (
            {"num_threads": 2, "dtype": "bfloat16", "kv_cache_dtype": "int8"},
            "portable",
            "native kernels for portable, 2 threads, bfloat16 weights, int8 KV cache",
        ),
        ({"quantization": "w8a8"}, "portable", "native kernels for portable, 1 thread, w8a8 weights, float32 KV cache"),
        ({"attention_backend": "torch"}, "auto", "plain torch operators, 1 thread, float32 weights, float32 KV cache"),
    ],
)
def test_what_computes_is_said(
    options: dict[str, object], isa: str, expected: str, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", isa)
    settings = {"model": str(model_path), "num_threads": 1, **options}
    assert Worker(resolve(EngineOptions.from_keywords(settings))).describe() == expected


def test_an_instruction_set_that_is_not_there(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx1024")
    config = resolve(EngineOptions(model=str(model_path), num_threads=1))
    with pytest.raises(Exception, match=r"QUIRE_CPU_ISA: 'avx1024' is not among .*portable"):
        Worker(config)
