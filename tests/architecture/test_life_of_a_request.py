"""The life of a request is told with the names of the files that it passes through, in order."""

from __future__ import annotations

import pytest

from tests.architecture.source import ROOT
from tests.architecture.test_documents import tree_paths

DOCUMENT = ROOT / "docs" / "life-of-a-request.md"
STAGES = (
    "quire/server/",
    "quire/engine/input_processor.py",
    "quire/engine/core.py",
    "quire/scheduler/",
    "quire/kv_cache/",
    "quire/step.py",
    "quire/executors/",
    "quire/worker/",
    "quire/models/",
    "quire/attention/",
    "quire/sampling/",
    "quire/engine/output_processor.py",
    "quire/server/streaming.py",
)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_told(stage: str) -> None:
    assert [path for path in tree_paths(DOCUMENT) if path.startswith(stage)]


def test_stages_come_in_order() -> None:
    """The first file named of each stage stands after the first one of the stage before."""
    text = DOCUMENT.read_text(encoding="utf-8")
    places = [text.index(f"`{stage}") for stage in STAGES]
    assert places == sorted(places)
