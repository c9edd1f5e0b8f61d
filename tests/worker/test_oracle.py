"""An oracle's drafts: the recorded text, with as many wrong tokens as asked for."""

from __future__ import annotations

import numpy as np

from quire.worker.oracle import Oracle


def test_drafts_of_a_recorded_text() -> None:
    oracle, text = Oracle(3, 0.7, seed=1, vocab_size=50), [each % 50 for each in range(1000)]
    oracle.begin_text(0, 10, "", text)
    oracle.copy_text(0, 2, 10)
    rows, lengths = np.array([0, 1, 2]), np.array([10, 10, 998])
    drafts, counts = np.zeros((3, 4), np.int32), np.zeros(3, np.int64)
    assert oracle.find_drafts(np.zeros((3, 1000), np.int32), rows, lengths, drafts, counts) == 2
    assert counts.tolist() == [4, 0, 2]
    positions = np.arange(1000)
    made = oracle.overwrite(np.zeros(1000, np.int64), positions, np.full(1000, 49))
    right = made == text
    assert 0.65 < right.mean() < 0.75
    assert (made[~right] == (np.array(text)[~right] + 1) % 50).all()
    assert drafts[0].tolist() == made[10:14].tolist()
    assert drafts[2, :2].tolist() == made[998:].tolist()
    again = Oracle(1, 0.7, seed=1, vocab_size=50)
    again.begin_text(0, 700, "", text)
    assert (again.overwrite(np.zeros(1000, np.int64), positions, made) == made).all()
    kept = oracle.overwrite(np.array([1, 0]), np.array([5, 1000]), np.array([7, 8]))
    assert kept.tolist() == [7, 8], "no text, and behind its end"
