"""Numbers that several processes add up: slots, the common one, and the lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.utils.shared_numbers import SLOT_BYTES, Numbers

NUM_ADDITIONS = 2000
ADD = """
import sys
from pathlib import Path
from quire.utils.shared_numbers import Numbers
numbers = Numbers.open(Path(sys.argv[1]), 3, int(sys.argv[2]))
cells = numbers.allocate(1)
for _ in range(int(sys.argv[3])):
    cells.own[0] += 1
    with numbers.lock():
        cells.common[0] += 1
"""


def test_each_slot_has_one_writer_and_all_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    parent = Numbers.create(path, 3)
    mappings = [*(Numbers.open(path, 3, slot) for slot in (0, 1)), parent]
    first = [numbers.allocate(2) for numbers in mappings]
    second = [numbers.allocate(1) for numbers in mappings]
    for number, cells in enumerate(first):
        cells.own[1] = 10.0**number
    second[0].own[0] = 5
    for cells in first:
        assert (list(cells.totals()), cells.total(1)) == ([0, 111], 111)
        assert cells.common[1] == 100
    again = Numbers.open(path, 3, 1).allocate(2)
    again.own[1] += 1
    assert first[0].total(1) == 112, "the next process of a slot counts on"
    assert [cells.total(0) for cells in second] == [5, 5, 5]


def test_processes_that_change_the_common_numbers_under_the_lock_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    cells = Numbers.create(path, 3).allocate(1)
    commands = [[sys.executable, "-c", ADD, str(path), str(slot), str(NUM_ADDITIONS)] for slot in (0, 1)]
    running = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in running] == [0, 0]
    assert [slot[0] for slot in cells.slots] == [NUM_ADDITIONS, NUM_ADDITIONS, 2 * NUM_ADDITIONS]


def test_alone_one_slot_is_all() -> None:
    cells = Numbers.alone().allocate(2)
    cells.own[0] += 2
    assert (list(cells.totals()), cells.common[0]) == ([2, 0], 2)


def test_a_slot_has_an_end() -> None:
    numbers = Numbers.alone()
    numbers.allocate(SLOT_BYTES // 8 - 1)
    with pytest.raises(ValueError, match="2 numbers do not fit into a slot: 8 bytes are left"):
        numbers.allocate(2)
