"""Loading of adapters beside a device's steps."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.adapter_orders import AdapterOrders, AdapterRef
from quire.config.adapter_files import content_digest
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.layers.device_adapters import DeviceAdapterStorage
from quire.models.adapters import ModelAdapters
from quire.models.loader import Extras, load_model
from quire.parallel.single import SINGLE_RANK
from quire.step import StepPlan
from quire.worker.adapters import AdapterLoads
from tests.fakes.adapters import write_adapter
from tests.fakes.streams import LoggingStreams
from tests.models.harness import save
from tests.models.test_adapters import LIMITS, MODEL


def test_a_load_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    """They may have rows of the adapter that was in the slot. The copies are on a stream of their own."""
    streams = LoggingStreams()
    storage = DeviceAdapterStorage(1, 16, torch.float32, streams)
    adapters, directory = ModelAdapters(LIMITS, storage), save(MODEL, tmp_path / "base")
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    load_model(config, LoadConfig("auto", 0), SINGLE_RANK, extras=Extras(adapters=adapters))
    loads = AdapterLoads(adapters)
    path = write_adapter(MODEL, tmp_path / "adapter", rank=3)
    orders = AdapterOrders([(1, AdapterRef(str(path), content_digest(path)))], awaits_report=True)
    plan = StepPlan(1, [], [], [], [], [], adapters=orders)
    loads.begin_plan(plan)
    ended = loads.end_plan(plan)
    loads.close()
    while not ended:
        ended = loads.end_plan(plan)
    assert ended == [(1, "")]
    assert streams.log[:2] == ["record 1 on compute", "host waits for 1"]
    assert len(streams.log) > 2
    assert all(entry.endswith(" on load") for entry in streams.log[2::2])
    ranks = torch.cat([stack.stored.matrices.ranks.flatten() for stack, _ in adapters.layers.stacks])
    assert ranks.tolist() == [0, *[3] * 7, 0]  # the file has neither embedding nor head
