"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import bodies, raw_http, templates
from tests.fuzz.harness import Fuzzer

FUZZERS: tuple[Fuzzer, ...] = (bodies.BODIES, raw_http.RAW_HTTP, templates.FUZZER)
