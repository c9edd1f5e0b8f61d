"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import (
    bodies,
    checkpoints,
    constraints,
    gguf_files,
    media_files,
    native_plans,
    operator_files,
    outputs,
    raw_http,
    templates,
    tokenizer_files,
)
from tests.fuzz.harness import Fuzzer

FUZZERS: tuple[Fuzzer, ...] = (
    bodies.BODIES,
    raw_http.RAW_HTTP,
    templates.FUZZER,
    checkpoints.FUZZER,
    gguf_files.FUZZER,
    native_plans.FUZZER,
    constraints.FUZZER,
    outputs.FUZZER,
    tokenizer_files.FUZZER,
    operator_files.FUZZER,
    media_files.FUZZER,
)
