"""Tiny models on disk, each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.models.families import FAMILIES
from tests.models.harness import randomize, save


@dataclass
class SavedModel:
    directory: Path
    reference: PreTrainedModel


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedModel]:
    """From a name in FAMILIES to that model, saved in float32, and Transformers' own instance of it."""
    made: dict[str, SavedModel] = {}

    def get(name: str) -> SavedModel:
        if name not in made:
            reference = randomize(FAMILIES[name]())
            made[name] = SavedModel(save(reference, tmp_path_factory.mktemp(name)), reference)
        return made[name]

    return get
