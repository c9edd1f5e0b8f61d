"""Random schedules over models that mix kinds of layers: windows, latents and states beside full attention."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

from quire.kv_cache.layout import group_layers
from tests.fakes.core import CoreDriver
from tests.fakes.groups import layer_spec
from tests.machines import run_machine
from tests.scheduler.test_state_machine import ENGINES, EngineMachine, engine_config

KINDS = [
    (None, "state"),
    ("state",),
    (None, "state", "state", 5),
    ("latent", "state"),
    ("latent", None, 7, "state"),
]


class KindsMachine(EngineMachine):
    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        **ENGINES
        | {"windows": st.sampled_from(KINDS), "block_size": st.sampled_from([2, 4]), "num_host_blocks": st.just(200)},
        state_snapshot_interval=st.sampled_from([4, 12]),
        max_pins=st.sampled_from([0, 1, 2]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, max_pins: int, **options: Any) -> None:
        options["num_host_blocks"] = 200
        self.drive(CoreDriver(engine_config(**options)), max_pins)


def test_random_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With borders of four tokens, so that short sequences cross many snapshots."""
    monkeypatch.setattr("quire.kv_cache.layout.STATE_BORDER", 4)
    groups, _ = group_layers([layer_spec(kind) for kind in KINDS[-1]], 4, 4)
    assert [group.block_size for group in groups] == [8, 4, 4, 8]
    run_machine(KindsMachine, examples=15, steps=60)
    totals = KindsMachine.totals
    for event in ("preemptions_total", "copied_blocks_total", "prefix_cache_hits_total", "evictions_total", "aborts"):
        assert totals[event] > 5, event
    assert totals["swapped_in_blocks_total"] > 0
    assert totals["hypotheses"] > 5
