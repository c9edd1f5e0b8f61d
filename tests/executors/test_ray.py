"""Ranks as actors of a Ray cluster of two nodes, which are two raylets of this host."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.errors import ConfigError, EngineDeadError
from quire.executors.local import LocalExecutor
from quire.executors.ranked import RankedExecutor
from tests.executors.test_multiprocess import configured, run
from tests.fakes.masks import AllowedByPosition
from tests.models.families import qwen3
from tests.models.harness import randomize, save

pytestmark = [pytest.mark.ray, pytest.mark.long]
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 75 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Its first node has one core, and so has the other one."""
    # Ray's niceness of actors is 15: beside other tests the seconds of their start become minutes.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args=NODE)
    nodes.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def of_one_rank(model_path: Path) -> dict[str, list[int]]:
    """Tokens of each request."""
    config = configured(model_path)
    alone = EngineCore(config, LocalExecutor(config), SystemClock(), masks=AllowedByPosition())
    tokens = run(alone)
    alone.shutdown()
    return tokens


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen3()), tmp_path_factory.mktemp("qwen3"))


def eventually(holds: Callable[[], bool]) -> None:
    """A minute is a bound for failure, not a claim."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def dead(core: EngineCore) -> str:
    """What an idle engine says when a rank has ended."""
    said: list[str] = []

    def has_noticed() -> bool:
        try:
            core.idle()
        except EngineDeadError as error:
            said.append(str(error))
        return bool(said)

    eventually(has_noticed)
    return said[0]


def taken() -> list[str]:
    """States of the actors and placement groups that are left."""
    from ray._private.state import actors as all_actors
    from ray.util.placement_group import placement_group_table

    groups = [group["state"] for group in placement_group_table().values()]
    actors = [actor["State"] for actor in all_actors().values()]
    return [state for state in groups + actors if state not in ("REMOVED", "DEAD")]


@pytest.mark.parametrize("kind", ["pipeline", "prefill_context"])
def test_the_bits_of_one_rank(cluster: Any, model_path: Path, of_one_rank: dict[str, list[int]], kind: str) -> None:
    """Its tokens, with hidden states of stages or prompts' keys over the network; a killed rank is told, and nothing is
    left."""
    from quire.executors.ray_ranks import RayRanks

    config = configured(model_path, distributed_executor_backend="ray", **{f"{kind}_parallel_size": 2})
    ranks = RayRanks(replace(config, ray_placement="strict_spread"), may_share_memory=False)
    core = EngineCore(config, RankedExecutor(ranks, config.parallel.pp), SystemClock(), masks=AllowedByPosition())
    assert len({host.node_id for host in ranks.hosts}) == 2
    assert run(core) == of_one_rank
    os.kill(ranks.hosts[1].process_id, signal.SIGKILL)
    assert f"rank 1 of 2 (process {ranks.hosts[1].process_id} on Ray's node" in dead(core)
    core.shutdown()
    eventually(lambda: not taken())


def test_ranks_of_two_nodes(cluster: Any, model_path: Path, of_one_rank: dict[str, list[int]]) -> None:
    """The tokens of one rank, with prefix hits, preemption, constraints and an abort: over the network, and again where
    the nodes share memory. A killed rank and a lost node are told in one line, and nothing is left of the ranks."""
    from quire.executors.ray_ranks import RayRanks

    options = {"tensor_parallel_size": 2, "queue_depth": 2, "distributed_executor_backend": "ray"}
    config = configured(model_path, **options, ray_placement="strict_spread")

    def start(*, may_share_memory: bool) -> tuple[EngineCore, RayRanks]:
        ranks = RayRanks(config, may_share_memory=may_share_memory)
        return EngineCore(config, RankedExecutor(ranks), SystemClock(), masks=AllowedByPosition()), ranks

    core, ranks = start(may_share_memory=False)
    nodes = [host.node_id for host in ranks.hosts]
    [other] = cluster.worker_nodes
    assert nodes == [cluster.head_node.node_id, other.node_id], "this node's ranks come first"
    assert run(core) == of_one_rank
    assert core.stats().preemptions_total > 0
    assert "on each of 2 ranks" in core.ready.backend
    eventually(lambda: core.vital_signs().silence < 2.0)
    os.kill(ranks.hosts[1].process_id, signal.SIGKILL)
    said = dead(core)
    assert f"rank 1 of 2 (process {ranks.hosts[1].process_id} on Ray's node {nodes[1][:8]}) has ended: " in said
    assert "\n" not in said
    core.shutdown()
    eventually(lambda: not taken())

    core, ranks = start(may_share_memory=True)
    assert run(core) == of_one_rank
    cluster.remove_node(other, allow_graceful=False)
    assert f"rank 1 of 2 (process {ranks.hosts[1].process_id} on Ray's node {nodes[1][:8]}) has ended: " in dead(core)
    core.shutdown()
    eventually(lambda: not taken())


def test_answers_that_ray_tells_of_out_of_order() -> None:
    from quire.executors.ray_ranks import RayRanks

    ranks = object.__new__(RayRanks)
    futures = [Future[bytes]() for _ in range(3)]
    ranks._asked, ranks._errors, ranks._events = [deque(futures)], {}, queue.SimpleQueue()
    for future in futures:
        ranks._await(0, future)
    found = []
    for number in (1, 0, 2):
        futures[number].set_result(bytes([number]))
        found.append(list(ranks._arrived(0.0)))
    assert found == [[], [(0, bytes([0])), (0, bytes([1]))], [(0, bytes([2]))]]


def test_a_cluster_without_a_place(cluster: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.executors import ray_ranks

    monkeypatch.setattr(ray_ranks, "PLACEMENT_SECONDS", 1.0)
    config = configured(model_path, tensor_parallel_size=2, num_threads=2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=r"Ray has no place for 2 ranks of 2 CPUs each \(ray_placement=pack\)"):
        ray_ranks.RayRanks(config)
    eventually(lambda: not taken())
