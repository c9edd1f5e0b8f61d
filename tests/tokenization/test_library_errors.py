from __future__ import annotations

import os

import pytest

from quire.tokenization.library_errors import STDERR, last_word_to_exceptions


class PanicException(BaseException):
    """As Rust's libraries raise it."""


def panic() -> None:
    os.write(STDERR, b"stack backtrace\n")
    raise PanicException


def test_what_is_written_is_kept_unless_an_exception_comes(capfd: pytest.CaptureFixture[str]) -> None:
    with last_word_to_exceptions():
        os.write(STDERR, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"
    with pytest.raises(PanicException), last_word_to_exceptions():
        panic()
    os.write(STDERR, b"after\n")
    assert capfd.readouterr().err == "after\n"
