"""Every model directory that once did harm, each by itself."""

from __future__ import annotations

import pytest

from tests.fuzz.checkpoints import CORPUS
from tests.fuzz.child import Child


@pytest.mark.long
def test_model_directories_load_or_are_refused() -> None:
    findings = {}
    child = Child("tests.fuzz.checkpoints:case")
    try:
        for name in CORPUS:
            try:
                child.run(name)
            except AssertionError as error:
                findings[name] = str(error)
                child.close()
                child = Child("tests.fuzz.checkpoints:case")
    finally:
        child.close()
    assert findings == {}
