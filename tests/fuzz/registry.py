"""All fuzzers."""

from __future__ import annotations

from tests.fuzz import templates
from tests.fuzz.bodies import BODIES
from tests.fuzz.harness import Fuzzer

FUZZERS: tuple[Fuzzer, ...] = (BODIES, templates.FUZZER)
