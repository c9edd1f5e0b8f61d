"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import checkpoints, gguf_files, native_plans
from tests.fuzz.harness import Fuzzer

FUZZERS: tuple[Fuzzer, ...] = (
    checkpoints.FUZZER,
    gguf_files.FUZZER,
    native_plans.FUZZER,
)
