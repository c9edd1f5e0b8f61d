"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import templates
from tests.fuzz.harness import Fuzzer

FUZZERS: tuple[Fuzzer, ...] = (templates.FUZZER,)
