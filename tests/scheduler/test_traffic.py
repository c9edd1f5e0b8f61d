"""Long random runs over the fake executor (tests/fakes/traffic.py). `make soak` runs far longer ones."""

from __future__ import annotations

from tests.fakes.traffic import EXERCISED, run_traffic

NUM_STEPS = 2000


def test_random_traffic() -> None:
    totals = run_traffic(2, NUM_STEPS)
    assert totals["engine_steps"] >= NUM_STEPS
    # What is to be crossed does happen, not just now and then.
    missing = {name: totals[name] for name, least in EXERCISED.items() if totals[name] < least * NUM_STEPS}
    assert not missing, f"the random engines were too roomy: {missing}"
