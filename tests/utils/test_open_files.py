"""The limit of open files is raised as far as it may be; connections fit into it."""

from __future__ import annotations

import resource

import pytest

from quire.utils.open_files import NUM_RESERVED, make_room_for_connections


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "fit"),
    [
        (1024, 1_000_000, 8192 + NUM_RESERVED, 8192),
        (1024, -1, 8192 + NUM_RESERVED, 8192),
        (1024, 4096, 4096, 4096 - NUM_RESERVED),
        (16, 16, 16, 1),
        (100_000, 100_000, None, 8192),
        (-1, -1, None, 8192),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, fit: int) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append(limits))
    warnings: list[tuple[object, ...]] = []
    monkeypatch.setattr("quire.utils.open_files.logger.warning", lambda *said: warnings.append(said))
    assert make_room_for_connections(8192) == fit
    assert [said[1:3] for said in warnings] == ([] if fit == 8192 else [(fit, 8192)])
    assert calls == ([] if raised is None else [(raised, hard)])
