"""Replicas that share experts, in processes: one is killed, all start again, and no token differs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import AsyncLLM
from quire.config.options import EngineOptions
from quire.engine.fleet import Fleet
from quire.engine.process_client import ProcessClient
from quire.errors import InternalError, QuireError
from tests.e2e.test_restart import GUARD_SECONDS, OPTIONS, ask_all, ids_request
from tests.long import all_but_long
from tests.models.families import qwen2_moe
from tests.models.harness import randomize, save
from tests.processes import has_ended

NUM_REQUESTS = 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen2_moe(decoder_sparse_step=1, mlp_only_layers=[])), tmp_path_factory.mktemp("qwen2-moe"))


def processes(engine: AsyncLLM) -> list[list[psutil.Process]]:
    """Of each replica: the engine's and its ranks'."""
    fleet = engine._session.client
    assert isinstance(fleet, Fleet)
    clients = [member.client for member in fleet.members]
    engines = [psutil.Process(client.pid) for client in clients if isinstance(client, ProcessClient)]
    return [[each, *each.children()] for each in engines]


@pytest.mark.parametrize(("tp", "pp"), all_but_long([(1, 1), (2, 1), (2, 2)], [(1, 1)]))
async def test_a_death_restarts_all_and_changes_no_bit(model_path: Path, tp: int, pp: int) -> None:
    """Of an engine, or of the last rank of one."""
    options: dict[str, Any] = {
        **OPTIONS,
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "data_parallel_size": 2,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "enable_expert_parallel": True,
    }
    engine = AsyncLLM.from_options(EngineOptions.from_keywords(options))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            _ = await asyncio.to_thread(lambda: engine.ready)
            undisturbed = await ask_all(engine, NUM_REQUESTS, ids_request)
            before = processes(engine)
            assert [len(each) for each in before] == [1 + (tp * pp if tp > 1 else 0)] * 2
            running = asyncio.ensure_future(ask_all(engine, NUM_REQUESTS, ids_request))
            fleet = engine._session.client
            assert isinstance(fleet, Fleet)
            while sum(entry.position for entry in list(fleet._entries.values())) < 30:
                await asyncio.sleep(0.001)
            os.kill(before[1][-1].pid, signal.SIGKILL)
            assert await running == undisturbed
            assert engine.num_restarts == 2
            assert all(has_ended(process) for each in before for process in each)
            with pytest.raises((QuireError, InternalError), match="cannot be stopped: the others need its experts"):
                await engine.stop_replica(0)
            await engine.sleep(1)
            await engine.wake_up()
            assert await ask_all(engine, 1, ids_request) == undisturbed[:1], "the other replica has no work"
            stats = await engine.stats()
            assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)
            last = processes(engine)
    finally:
        engine.shutdown()
    assert all(has_ended(process) for each in last for process in each)
