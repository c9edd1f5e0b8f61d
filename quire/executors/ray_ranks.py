"""Ranks as actors of a Ray cluster, each in a bundle of one placement group."""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.config.device import BETWEEN_HOSTS
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.executors.calls import RankCalls
from quire.executors.interface import Executor, VitalSigns
from quire.executors.rank import JOIN
from quire.executors.ranked import RankedExecutor
from quire.executors.ray_rank import RankHost, RayRank
from quire.utils.heartbeat import Heartbeat, decode_beats

PLACEMENT_SECONDS = 60.0
"""Seconds for Ray to place all ranks."""
LAST_WORDS = 400
"""Length limit of Ray's explanation of an actor's end."""
STRATEGIES = {"pack": "PACK", "strict_spread": "STRICT_SPREAD"}


def make_ray_executor(config: EngineConfig) -> Executor:
    """Start an actor for each rank of the configuration. Raises ConfigError, or a rank's error."""
    return RankedExecutor(RayRanks(config), config.parallel.pp)


class RayPulse:
    """Asks one rank at every look, unless the last question is still open."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._heartbeat = Heartbeat()
        self._asked: Future[int] | None = None
        self._stalled: float | None = None

    def feel(self) -> VitalSigns:
        asked = self._asked
        if asked is not None and not asked.done():
            self._heartbeat.look()
        else:
            if asked is not None and asked.exception() is None:
                self._stalled = decode_beats(bytes([asked.result()]))
                self._heartbeat.beat()
            self._asked = self._actor.beat.options(concurrency_group="beat").remote().future()
        return VitalSigns(self._heartbeat.silence, math.inf if self._stalled is None else self._stalled)

    def close(self) -> None:
        """Do nothing."""


class RayRanks(RankCalls):
    """Implements `Workers`: messages are calls of actors, and Ray reports their ends."""

    def __init__(self, config: EngineConfig, *, may_share_memory: bool = True) -> None:
        """Connect to the cluster of this process or host, or start one; place the ranks, and return when they have met.
        may_share_memory: False: ranks use the network alone. Raises ConfigError if the cluster has no place for the
        ranks, or a rank's error."""
        sizes, device = config.parallel, config.device
        super().__init__(sizes.num_devices)
        self._events: queue.SimpleQueue[tuple[int, Future[bytes] | None]] = queue.SimpleQueue()
        self._actors: list[Any] = []
        self._hosts: list[RankHost] = []
        self._asked: list[deque[Future[bytes]]] = [deque() for _ in range(self._num_ranks)]
        """Answers of each rank that have not come, or not before an earlier one."""
        self._errors: dict[int, BaseException] = {}
        self._placement: Any = None
        self._has_connected = _connect(self._num_ranks * device.num_threads)
        try:
            self._actors = self._place(device.num_threads, config.ray_placement)
            self._in_order()
            memories = {host.memory for host in self._hosts}
            collectives = None if may_share_memory and len(memories) == 1 else BETWEEN_HOSTS
            first = self._hosts[0].address
            port = ray.get(self._actors[0].open_meeting.remote(first))
            begun = [
                actor.begin.remote(rank, host.address, first, port, collectives)
                for rank, (actor, host) in enumerate(zip(self._actors, self._hosts, strict=True))
            ]
            ray.get(begun)
            self._pulses += [RayPulse(actor) for actor in self._actors]
            for rank, actor in enumerate(self._actors):
                self._await(rank, actor.live.options(concurrency_group="live").remote().future())
            self._reader.start()
            self.call(JOIN, config)
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                raise QuireError(f"Ray has not started the ranks: {_last_words(error)}") from None
            raise

    @property
    def hosts(self) -> Sequence[RankHost]:
        return self._hosts

    def _place(self, num_threads: int, strategy: str) -> list[Any]:
        bundles = [{"CPU": num_threads}] * self._num_ranks
        self._placement = placement_group(bundles, strategy=STRATEGIES[strategy])
        if not self._placement.wait(PLACEMENT_SECONDS):
            cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
            raise ConfigError(
                f"Ray has no place for {self._num_ranks} ranks of {num_threads} CPUs each (ray_placement={strategy}): "
                f"its nodes have {', '.join(map(str, cores))} CPUs, some of them taken",
                param="distributed_executor_backend",
            )
        make = ray.remote(num_cpus=num_threads, max_restarts=0, concurrency_groups={"beat": 1, "live": 1})(RayRank)
        places = (PlacementGroupSchedulingStrategy(self._placement, index) for index in range(self._num_ranks))
        return [make.options(scheduling_strategy=place).remote() for place in places]

    def _in_order(self) -> None:
        hosts = [RankHost(*host) for host in ray.get([actor.host.remote() for actor in self._actors])]
        here = ray.get_runtime_context().get_node_id()
        order = sorted(range(len(hosts)), key=lambda index: (hosts[index].node_id != here, hosts[index].node_id, index))
        self._actors, self._hosts = [self._actors[index] for index in order], [hosts[index] for index in order]

    def _send(self, message: bytes) -> None:
        for rank, actor in enumerate(self._actors):
            future = actor.answer.remote(message).future()
            self._asked[rank].append(future)
            self._await(rank, future)

    def _await(self, rank: int, future: Future[bytes]) -> None:
        future.add_done_callback(lambda done: self._events.put((rank, done)))

    def _arrived(self, seconds: float | None) -> Iterator[tuple[int, bytes | None]]:
        with suppress(queue.Empty):
            rank, future = self._events.get(timeout=seconds)
            error = None if future is None else future.exception()
            if error is not None:
                self._errors[rank] = error
            if future is None or error is not None:
                yield rank, None
            asked = self._asked[rank]
            while asked and asked[0].done() and asked[0].exception() is None:  # Ray may tell of a later call first
                yield rank, asked.popleft().result()

    def _explain_exit(self, rank: int) -> str:
        error = self._errors.get(rank)
        if error is None:
            return "the executor is shut down"
        host = self._hosts[rank]
        where = f"rank {rank} of {self._num_ranks} (process {host.process_id} on Ray's node {host.node_id[:8]})"
        return f"{where} has ended: {_last_words(error)}"

    def _end_ranks(self) -> None:
        for actor in self._actors:
            with suppress(Exception):  # the cluster may have ended as well
                ray.kill(actor, no_restart=True)

    def _close(self) -> None:
        self._end_ranks()
        if self._reader.is_alive():
            self._events.put((0, None))
            self._reader.join()
        with suppress(Exception):  # the cluster may have ended
            if self._placement is not None:
                remove_placement_group(self._placement)
        if self._has_connected:
            ray.shutdown()


def _connect(num_cpus: int) -> bool:
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": "ERROR"}
    try:
        ray.init(address="auto", **options)
    except ConnectionError:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)
    return True


def _last_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("The actor is dead")), lines[0] if lines else "")
    return f"{type(error).__name__}: {reason}"[:LAST_WORDS]
