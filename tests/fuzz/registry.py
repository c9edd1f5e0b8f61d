"""All fuzzers."""

from __future__ import annotations

from tests.fuzz.harness import Fuzzer
from tests.fuzz.raw_http import RAW_HTTP

FUZZERS: tuple[Fuzzer, ...] = (RAW_HTTP,)
