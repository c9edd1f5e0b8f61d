"""GGUF files with anything in them (tests/models/test_gguf_fuzz.py has what is done to them, and what is promised)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.fuzz.harness import Attack, Fuzzer


@contextmanager
def target() -> Iterator[Attack]:
    from tests.models.test_gguf_fuzz import NUMBERS, changed, refuse_or_load, sound

    directory = Path(tempfile.mkdtemp(prefix="quire-fuzz-"))
    kinds = ("byte", "word", "long", "cut", "repeat", "remove")

    def attack(rng: Random) -> None:
        data, ends = sound()
        changes = [
            (rng.choice(kinds), rng.randrange(2**20), rng.choice((*NUMBERS, rng.getrandbits(64))))
            for _ in range(rng.randrange(1, 4))
        ]
        end = len(data) if rng.random() < 0.3 else max(ends) + 100
        refuse_or_load(changed(data, changes, end), directory)

    try:
        yield attack
    finally:
        shutil.rmtree(directory)


FUZZER = Fuzzer("gguf", target, num_test_cases=100)
