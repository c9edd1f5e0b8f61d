"""The matrix of drafts in docs/features.md: each cell that the table of cells names is there, and its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.draft_cells import CELLS, END, HERE, PAGE, START, table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_cells() -> None:
    """`python -m tests.e2e.draft_cells` writes them, from tests that ran."""
    found = PAGE.read_text().split(START)[1].split(END)[0].strip("\n")
    assert found == table({name: tuple(map(bool, cells)) for name, cells in CELLS.items()}).strip("\n")


def test_the_tests_of_cells_exist() -> None:
    for cells in CELLS.values():
        for pattern in filter(None, cells):
            file, _, rest = pattern.partition("::")
            name = re.split(r"\\\[", rest)[0]
            assert re.search(rf"^(?:async )?def {name}\w*\(", (ROOT / HERE / file).read_text(), re.MULTILINE), pattern
