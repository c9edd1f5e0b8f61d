"""The upload of a step: columns, buffers that take turns, and rounds of writes."""

from __future__ import annotations

import numpy as np
import torch

from quire.worker.platform.streams import HostStreams
from quire.worker.platform.upload import FIRST_CAPACITY, SECTION_ALIGNMENT, RowWrites, Upload
from tests.fakes.streams import LoggingStreams


def test_columns_of_any_shape_come_up_as_they_are() -> None:
    upload = Upload(HostStreams(), 2)
    arrays = [np.arange(5), np.array([[1, -2], [3, 2**31 - 1]]), np.zeros(0, np.int64), np.arange(40) - 2**31]
    for _ in range(3):
        upload.begin()
        sections = [upload.add(values) for values in arrays]
        upload.send()
        for section, values in zip(sections, arrays, strict=True):
            assert section.start % SECTION_ALIGNMENT == 0
            assert upload.view(section).dtype == torch.int32
            assert upload.view(section).tolist() == values.tolist()


def test_a_large_step_grows_the_buffers_and_keeps_what_was_there() -> None:
    upload = Upload(HostStreams(), 2)
    upload.begin()
    first = upload.add(np.array([7, 8, 9]))
    large = upload.add(np.arange(3 * FIRST_CAPACITY))
    upload.send()
    assert upload.view(first).tolist() == [7, 8, 9]
    assert upload.view(large).tolist() == list(range(3 * FIRST_CAPACITY))


def test_a_buffer_is_filled_again_only_when_it_was_copied() -> None:
    streams = LoggingStreams()
    upload = Upload(streams, 2)
    for step in range(4):
        upload.begin()
        upload.add(np.array([step]))
        upload.send()
    # The host waits for copies: of step 0 before it fills that buffer for step 2, of step 1 before step 3.
    assert [line for line in streams.log if line.startswith("host") or line.endswith("copy in")] == [
        "record 3 on copy in",
        "record 5 on copy in",
        "host waits for 3",
        "record 7 on copy in",
        "host waits for 5",
        "record 9 on copy in",
    ]


def test_the_order_of_copies_and_kernels() -> None:
    """A step's copy waits for what was enqueued before the previous step, and for no kernel of that step; the step's
    kernels wait for its copy; the host waits for nothing."""
    streams = LoggingStreams()
    upload = Upload(streams, 5)
    assert streams.log == ["record 1 on compute"]
    for step in range(3):
        upload.begin()
        upload.add(np.array([step]))
        upload.send()
        streams.log.append(f"step {step} computes")
    assert streams.log[1:] == [
        "record 2 on compute",
        "copy in waits for 1",
        "record 3 on copy in",
        "compute waits for 3",
        "step 0 computes",
        "record 4 on compute",
        "copy in waits for 2",  # beside step 0
        "record 5 on copy in",
        "compute waits for 5",
        "step 1 computes",
        "record 6 on compute",
        "copy in waits for 4",  # behind step 0, which read this buffer, and beside step 1
        "record 7 on copy in",
        "compute waits for 7",
        "step 2 computes",
    ]


def test_a_larger_buffer_is_filled_behind_what_may_have_used_its_memory() -> None:
    """torch hands out memory that kernels enqueued on the compute stream may still read."""
    streams = LoggingStreams()
    upload = Upload(streams, 2)
    upload.begin()
    upload.add(np.zeros(FIRST_CAPACITY + 1))
    upload.send()
    assert streams.log[1:] == [
        "record 2 on compute",
        "copy in waits for 2",
        "record 3 on copy in",
        "compute waits for 3",
    ]


def test_views_of_a_step_stay_while_the_next_one_is_copied() -> None:
    upload, views = Upload(HostStreams(), 3), []
    for step in range(2):
        upload.begin()
        section = upload.add(np.full(4, step))
        upload.send()
        views.append(upload.view(section))
    assert [view.tolist() for view in views] == [[0] * 4, [1] * 4]


def arena_after(writes: RowWrites, size: int = 64) -> list[int]:
    upload = Upload(HostStreams(), 1)
    upload.begin()
    writes.add_to(upload)
    upload.send()
    arena = torch.arange(size, dtype=torch.int32)
    writes.apply(upload, arena)
    found: list[int] = arena.tolist()
    return found


def words(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_writes_and_copies_take_effect_in_order() -> None:
    """A write behind a copy changes the copy, not what was copied; a copy of a copy sees the first one."""
    writes = RowWrites()
    writes.write(0, words(100, 101))
    writes.write(5, words())
    writes.copy(0, 10, 4)
    writes.write(11, words(200))
    writes.copy(10, 20, 3)
    writes.copy(0, 30, 1)
    writes.copy(20, 40, 3)
    expected = list(range(64))
    expected[0:2] = [100, 101]
    expected[10:14] = [100, 200, 2, 3]
    expected[20:23] = [100, 200, 2]
    expected[30:31] = [100]
    expected[40:43] = [100, 200, 2]
    assert arena_after(writes) == expected
    # On a device the copies of a round run side by side: what one writes no other of it may read.
    assert [len(each.copies) for each in writes._rounds] == [1, 2, 1]


def test_a_step_without_changes_launches_nothing() -> None:
    writes = RowWrites()
    assert arena_after(writes) == list(range(64))
    assert [(each.values, each.copies) for each in writes._sections] == [(None, None)]
