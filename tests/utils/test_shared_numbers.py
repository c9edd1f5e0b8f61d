"""Numbers that several processes add up: slots, the common one, and the lock."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from quire.utils.shared_numbers import SLOT_BYTES, Numbers

HOLD = """
import sys, time
from pathlib import Path
from quire.utils.shared_numbers import Numbers
numbers = Numbers.open(Path(sys.argv[1]), 3, 0)
cells = numbers.allocate(1)
with numbers.lock():
    cells.common[0] += 1
    print("locked", flush=True)
    time.sleep(3600)
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


def test_the_lock_keeps_other_processes_out_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = Numbers.create(path, 3)
    cells = numbers.allocate(1)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    with path.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    with numbers.lock():
        cells.common[0] += 1
    assert cells.common[0] == 2
    holder.wait()
    holder.stdout.close()


def test_alone_one_slot_is_all() -> None:
    cells = Numbers.alone().allocate(2)
    cells.own[0] += 2
    assert (list(cells.totals()), cells.common[0]) == ([2, 0], 2)


def test_a_slot_has_an_end() -> None:
    numbers = Numbers.alone()
    numbers.allocate(SLOT_BYTES // 8 - 1)
    with pytest.raises(ValueError, match="2 numbers do not fit into a slot: 8 bytes are left"):
        numbers.allocate(2)
