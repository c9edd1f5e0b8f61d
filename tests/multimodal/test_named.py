"""Pictures by the names that clients give them."""

from __future__ import annotations

import numpy as np

from quire.multimodal.cache import ENTRY_BYTES
from quire.multimodal.named import NamedPictures, name_key


def test_names_are_of_an_owner() -> None:
    keys = {name_key(owner, uuid) for owner, uuid in (("a", "b"), ("a", "c"), ("ab", ""), ("", "ab"), ("1:a", "b"))}
    assert len(keys) == 5


def test_the_picture_that_was_named_last_counts() -> None:
    names = NamedPictures(2**16)
    names.put(b"n", b"first", b"1")
    assert (names.picture_of(b"n"), names.holds(b"n", b"1"), names.holds(b"m", b"1")) == (b"first", True, False)
    names.put(b"n", b"second", b"2")
    assert (names.picture_of(b"n"), names.holds(b"n", b"1"), names.picture_of(b"m")) == (b"second", False, None)
    names.clear()
    assert names.picture_of(b"n") is None


def test_those_that_were_used_last_are_kept() -> None:
    size = 2**12
    names = NamedPictures(2 * (size + ENTRY_BYTES))
    for name in (b"1", b"2"):
        names.put(name, bytes(size))
    assert names.picture_of(b"1") is not None
    names.put(b"3", np.zeros((2**6, 2**6, 1), np.uint8))
    assert [names.picture_of(name) is not None for name in (b"1", b"2", b"3")] == [True, False, True]
    names.put(b"1", bytes(2**14))
    assert [names.picture_of(name) is not None for name in (b"1", b"2", b"3")] == [False, False, True], (
        "larger than all"
    )
