"""The baselines on an engine core over the fake executor, which checks every plan."""

from __future__ import annotations

from typing import Any

from benchmarks.baselines.contiguous import ContiguousScheduler
from benchmarks.baselines.systems import SYSTEMS
from tests.fakes.core import CoreClient, make_config
from tests.fakes.executor import FakeExecutor

BASELINES = [name for name in SYSTEMS if not name.startswith("Quire")]


class Driver(CoreClient):
    """Runs one system. After each step its accounts are compared with what the executor's rows hold."""

    def __init__(self, system: str, **config: Any) -> None:
        config = {"enable_prefix_caching": False, "max_model_len": 64, "max_num_batched_tokens": 128} | config
        made = make_config(**config)
        self.executor = FakeExecutor(windows=made.model.sliding_windows, record=True)
        self.executor.profile(made.scheduler.max_num_batched_tokens, made.scheduler.max_num_seqs)
        super().__init__(made, self.executor, SYSTEMS[system])

    @property
    def system(self) -> ContiguousScheduler:
        scheduler = self.core.scheduler
        assert isinstance(scheduler, ContiguousScheduler)
        return scheduler

    def step(self) -> None:
        super().step()
        self.system.check()
        self._check_accounts()

    def _check_accounts(self) -> None:
        """Stored is what the workers have computed for sequences that live, where nothing is in flight."""
        if self.system._in_flight or self.system._copies:
            return  # forked children whose copy is due count already: the copy is part of the next plan
        live = {s.seq_id for request in self.system._rows for s in request.live_sequences if s.blocks is not None}
        stored = sum(row.num_computed or 0 for seq_id, row in self.executor._rows.items() if seq_id in live)
        assert self.core.stats().num_stored_tokens == stored

    @property
    def batch_sizes(self) -> list[int]:
        return [len(plan.seq_ids) for plan in self.executor.plans]
