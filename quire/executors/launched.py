"""One rank in a process of a launcher such as torchrun: each process runs the whole engine on the same inputs. Engines
decide on shared values alone: the first rank's clock, the least memory, the highest costs."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import torch
import torch.distributed

from quire import envs
from quire.clock import Clock, SystemClock
from quire.config.device import BETWEEN_HOSTS
from quire.config.engine import EngineConfig
from quire.config.parallel import RANK_SIZES
from quire.errors import ConfigError, QuireError
from quire.executors.interface import StepFuture
from quire.executors.local import LocalExecutor
from quire.executors.ranked import SampledTokens, alike, reduce_profiles, slowest
from quire.executors.wire import decode, encode
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.parallel.choice import join_group
from quire.parallel.hosts import own_address, shared_memory
from quire.parallel.interface import ProcessGroup
from quire.parallel.mesh import Mesh, Place
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, Stage, network_links
from quire.parallel.torch_dist import LOOPBACK, NetworkMeeting
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.pending_step import PendingStep
from quire.worker.platform.choice import make_platform

OPTION = "distributed_executor_backend"


class AgreedClock:
    """Implements Clock: the first rank's time. All ranks look at it equally often. Raises QuireError if this rank has
    planned other steps than the first one."""

    def __init__(self, group: ProcessGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._digest = 0

    def note(self, plan: bytes) -> None:
        """Add a plan that this rank begins to its digest, which `now` compares with the first rank's."""
        self._digest = zlib.crc32(plan, self._digest)

    def now(self) -> float:
        own = torch.tensor([self._clock.now(), self._digest], dtype=torch.float64)
        now, digest = self._group.broadcast(own, source=0).tolist()
        if digest != self._digest:
            raise QuireError(
                f"rank {self._group.rank} plans other steps than rank 0: every rank must be given the same requests, "
                "in the same order"
            )
        return float(now)


class LaunchedRank(LocalExecutor):
    """Executor of one of several equal engines, one per rank, that run in step."""

    def __init__(self, config: EngineConfig) -> None:
        """Return when all ranks have met. Raises ConfigError if the launcher started another number of processes than
        there are ranks."""
        layers, prompts, self._agreement, stage = _join(config)
        super().__init__(config, make_platform(config, layers, stage, prompts))
        self.agreed_clock = AgreedClock(self._agreement, SystemClock())
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StepResult).decode
        self._num_stages = stage.count
        self._sampler = Mesh(config.parallel).rank(Place(0, stage.count - 1, 0))
        self._sampled = SampledTokens()
        self._last: PendingStep | None = None

    def load_model(self) -> list[LayerSpec]:
        return alike(self._gather(super().load_model()))

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return reduce_profiles(self._gather(super().profile(max_num_batched_tokens, max_num_seqs)))

    def measure_preemption_costs(self) -> PreemptionCosts:
        return slowest(self._gather(super().measure_preemption_costs()))

    def describe_backend(self) -> str:
        return f"{super().describe_backend()}, as rank {self._agreement.rank} of {self._agreement.size} engines"

    def execute(self, plan: StepPlan) -> StepFuture:
        self.agreed_clock.note(self._encode(plan))
        if self._num_stages == 1:
            return super().execute(plan)
        own = super().execute(self._sampled.bring(plan))
        self._last = PendingStep(plan.step_id, lambda: self._of_last_stage(own.result()), self._last)
        return self._last

    def sleep(self, level: int) -> None:
        self._sampled, self._last = SampledTokens(), None  # the ranks forget all sequences
        super().sleep(level)

    def _of_last_stage(self, own: StepResult) -> StepResult:
        # Engines ask for results in one order, on the thread of the other agreements.
        group, source = self._agreement, self._sampler
        message = torch.frombuffer(bytearray(self._encode(own)), dtype=torch.uint8)
        size = int(group.broadcast(torch.tensor([len(message)]), source))
        if group.rank != source:
            message = torch.zeros(size, dtype=torch.uint8)
        result = self._decode(group.broadcast(message, source).numpy().tobytes())
        self._sampled.take(result)
        return result

    def _gather(self, value: Any) -> list[Any]:
        data = encode(value)
        sizes = self._agreement.all_gather(torch.tensor([len(data)]), dim=0).tolist()
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._agreement.all_gather(own[None], dim=0)
        return [decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _join(config: EngineConfig) -> tuple[ProcessGroup, ProcessGroup, ProcessGroup, Stage]:
    library: Any = torch.distributed
    try:
        store, rank, size = next(library.rendezvous("env://"))
    except ValueError as error:
        raise ConfigError(
            f"{OPTION}='external_launcher' is for programs that a launcher starts, such as `torchrun "
            f"--nproc-per-node {config.parallel.num_devices} program.py`: {error}",
            param=OPTION,
        ) from None
    if size != config.parallel.num_devices:
        raise ConfigError(
            f"{OPTION}='external_launcher': the launcher has started {size} processes, and "
            f"{' times '.join(RANK_SIZES)} is {config.parallel.num_devices}",
            param=OPTION,
        )
    number = store.add(f"quire: engines of rank {rank}", 1)  # a program may make several engines, one after the other
    store = library.PrefixStore(f"quire: engine {number}", store)
    store.set(f"memory of rank {rank}", shared_memory())
    memories = {store.get(f"memory of rank {each}") for each in range(size)}
    is_one_host = len(memories) == 1
    address = LOOPBACK if is_one_host else own_address(envs.launcher_address())

    def meeting(name: str) -> NetworkMeeting:
        return NetworkMeeting(library.PrefixStore(name, store), address)

    collectives = config.device.collectives if is_one_host else BETWEEN_HOSTS
    place, sizes = Mesh(config.parallel).place(rank), config.parallel
    layers: ProcessGroup = SINGLE_RANK
    prompts: ProcessGroup = SINGLE_RANK
    if sizes.tp > 1:
        layers = join_group(collectives, meeting(f"layers {place.pcp}"), place.tp, sizes.tp)
    if sizes.pcp > 1:
        prompts = join_group(collectives, meeting(f"prompts {place.tp}"), place.pcp, sizes.pcp)
    stage = WHOLE_MODEL
    if sizes.pp > 1:
        numbers = config.model.shape.stages(sizes.pp)[place.pp]
        stage = Stage(place.pp, sizes.pp, numbers, *network_links(meeting, place, sizes.pp))
    return layers, prompts, join_group(BETWEEN_HOSTS, meeting("agreement"), rank, size), stage
