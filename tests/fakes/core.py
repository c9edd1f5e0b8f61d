"""An engine core over the fake executor, and a client that collects what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from quire.clock import VirtualClock
from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.model_shape import AttentionShape, LayerShape, ModelShape
from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, AddRequest
from quire.engine.observer import CoreObserver
from quire.executors.interface import Executor
from quire.kv_cache.layout import block_bytes, group_layers
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from quire.scheduler.interface import SchedulerFactory, paged_scheduler
from quire.scheduler.preemption import PreemptionCosts
from quire.step import TokenLogprobs
from tests.fakes.disk import FakeDisk
from tests.fakes.executor import FakeExecutor
from tests.fakes.groups import Kind, kind_of, layer_spec
from tests.fakes.ledger import SlotLedger
from tests.fakes.masks import AllowedByPosition, MaskingExecutor
from tests.fakes.remote import FakeRemote

SCHEDULER = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8, max_prefill_chunk=None, queue_depth=1)


def _attention(kind: Kind) -> AttentionShape:
    if isinstance(kind, str):
        return AttentionShape(kind, 1, 1, 8, 8)
    return AttentionShape("full" if kind is None else "sliding", 1, 1, 8, 8, kind)


def _shape(kinds: tuple[Kind, ...]) -> ModelShape:
    """One layer of each kind, with one head of eight elements."""
    layers = [
        LayerShape(
            _attention(kind),
            projections=((8, 24), (8, 8)),
            intermediate=32,
            experts=None,
            is_gated=True,
            num_vectors=16,
        )
        for kind in kinds
    ]
    return ModelShape(
        name="fake",
        family="fake",
        layers=tuple(layers),
        hidden=8,
        vocab=97,
        max_model_len=128,
        dtype="float32",
        expert_dtype="float32",
        is_tied=False,
        embedding_width=8,
        positions=0,
        num_vectors=8,
    )


def make_config(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[Kind, ...] = (None, None),
    enable_prefix_caching: bool = True,
    max_model_len: int = 128,
    num_host_blocks: int = 0,
    offload: bool = False,
    state_snapshot_interval: int = 8,
    **scheduler: float | str | None,
) -> EngineConfig:
    """num_host_blocks: at most, for `size_pool` makes it no more than is useful. `scheduler`: fields of SchedulerConfig
    that differ from SCHEDULER's."""
    groups, layers_per_group = group_layers(
        FakeExecutor(windows=windows).load_model(), block_size, state_snapshot_interval
    )
    return EngineConfig(
        model=ModelConfig(
            name="fake",
            path=Path("fake"),
            architecture="Fake",
            dtype="float32",
            kv_cache_dtype="float32",
            shape=_shape(windows),
            max_model_len=max_model_len,
            eos_token_ids=(0,),
            hf=MappingProxyType({}),
        ),
        cache=CacheConfig(
            block_size=block_size,
            memory=None,
            memory_utilization=0.5,
            num_blocks_override=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            swap_space=num_host_blocks * block_bytes(groups, layers_per_group),
            offload_dir=Path("fake") if offload else None,
            state_snapshot_interval=state_snapshot_interval,
        ),
        scheduler=replace(SCHEDULER, **scheduler),
        load=LoadConfig(load_format="dummy", seed=0),
        device=DeviceConfig(device="cpu", num_threads=1, attention_backend="torch"),
        seed=0,
    )


class CoreClient:
    """Feeds an EngineCore and keeps every sequence's tokens, log-probabilities and end."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        make_scheduler: SchedulerFactory = paged_scheduler,
        observers: Sequence[CoreObserver] = (),
    ) -> None:
        self.clock = VirtualClock()
        self.masks = AllowedByPosition(config.model.vocab_size, self.clock)
        self.core = EngineCore(config, executor, self.clock, make_scheduler, self.masks, observers)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.rankings: dict[tuple[str, int], tuple[float, float]] = {}
        self.pooled: dict[str, list[float]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.prompt_logprob_positions: dict[str, list[int]] = {}
        self.refused: dict[str, str] = {}

    @property
    def scheduler(self):  # type: ignore[no-untyped-def]
        return self.core.scheduler

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        seed: int = 1,
        eos: tuple[int, ...] = (),
        bad: list[list[int]] | None = None,
        salt: str = "",
        priority: int = 0,
        **params,
    ) -> None:  # type: ignore[no-untyped-def]
        names = (
            "client",
            "register_prefix",
            "pooling",
            "columns",
            "constraint",
            "thinking_budget",
            "images",
            "prediction",
            "resume_point",
            "is_background",
        )
        fields = {name: params.pop(name) for name in names if name in params}
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
        self.core.handle(
            AddRequest(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    params=sampling,
                    max_tokens=sampling.max_tokens or 8,
                    seed=seed,
                    eos_token_ids=list(eos),
                    bad_token_sequences=bad or [],
                    cache_salt=salt,
                    priority=priority,
                    **fields,
                )
            )
        )

    def register_prefix(self, request_id: str, prefix: list[int], salt: str = "") -> None:
        """Ask for a prefix to be registered."""
        self.add(request_id, prefix, salt=salt, register_prefix=True, max_tokens=1)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.core.handle(Abort(request_id, index))

    def step(self) -> None:
        self.clock.advance(0.01)
        outputs = self.core.step()
        for rejected in outputs.rejections:
            self.refused[rejected.request_id] = rejected.message
        for update in outputs.updates:
            self._take(update)

    def _take(self, update: SequenceUpdate) -> None:
        key = (update.request_id, update.index)
        assert key not in self.finished, f"{key} got a token after its end"
        self.tokens.setdefault(key, []).extend(update.new_token_ids)
        self.logprobs.setdefault(key, []).extend(update.logprobs or [])
        if update.ranking is not None:
            self.rankings[key] = update.ranking
        if update.prompt_logprobs is not None:
            start, entries = update.prompt_logprobs.start, update.prompt_logprobs.entries
            positions = self.prompt_logprob_positions.setdefault(update.request_id, [])
            positions.extend(range(start, start + len(entries)))
            self.prompt_logprobs.setdefault(update.request_id, []).extend(entries)
        if update.pooled is not None:
            assert update.finish_reason is FinishReason.STOP
            assert not update.new_token_ids
            self.pooled[update.request_id] = update.pooled
        if update.finish_reason is not None:
            self.finished[key] = update.finish_reason

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; checks the invariants after each step and that every block is free at the end."""
        for _ in range(max_steps):
            if not self.core.has_work:
                self.assert_all_free()
                return
            self.step()
            self.scheduler.check()
        raise AssertionError(f"still at work after {max_steps} steps")

    def assert_all_free(self) -> None:
        stats = self.core.stats()
        leaked = stats.num_used_blocks - stats.num_registered_blocks
        assert leaked == 0, f"{leaked} blocks leaked"
        assert stats.num_used_host_blocks == stats.num_swapped == 0, f"{stats.num_used_host_blocks} host blocks leaked"
        assert stats.num_running == stats.num_waiting == 0


class CoreDriver(CoreClient):
    """A CoreClient over the fake executor, which verifies every plan; a ledger verifies the accounts of KV memory."""

    def __init__(
        self,
        config: EngineConfig,
        costs: PreemptionCosts | None = None,
        disk: FakeDisk | None = None,
        *,
        remote: FakeRemote | None = None,
        nonfinite_token: int | None = None,
        make_scheduler: SchedulerFactory = paged_scheduler,
        **executor_options: object,
    ) -> None:
        kinds = [kind_of(layer.attention) for layer in config.model.shape.layers]
        cache = config.cache
        groups, _ = group_layers(list(map(layer_spec, kinds)), cache.block_size, cache.state_snapshot_interval)
        states = [index for index, group in enumerate(groups) if not group.spec.token_bytes]
        self.ledger = SlotLedger(*(group.block_size for group in groups), states=states)
        self.executor = MaskingExecutor(windows=kinds, **executor_options)  # type: ignore[arg-type]
        self.executor.connector = disk or remote
        self.executor.nonfinite_token = nonfinite_token
        self.executor.queue_depth = config.scheduler.queue_depth
        self.executor.observe = self.ledger.follow
        # A core with a given pool size does not profile, which is where the fake learns the limits that it enforces.
        self.executor.profile(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        self.executor.costs = costs or self.executor.costs
        super().__init__(config, self.executor, make_scheduler)

    def step(self) -> None:
        super().step()
        self.ledger.has_drafts |= self.executor.num_discarded > 0  # a plan does not say which samples are discarded
        self.ledger.check(self.scheduler)

    def abort(self, request_id: str, index: int | None = None) -> None:
        super().abort(request_id, index)
        self.ledger.check(self.scheduler)


def generate_alone(prompt: list[int], *, seed: int = 1, eos: tuple[int, ...] = (), **params) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """The tokens of each completion when the request has a large engine to itself, without caching or chunking."""
    driver = run_alone(prompt, seed=seed, eos=eos, **params)
    return [driver.tokens[key] for key in sorted(driver.tokens)]


def pool_alone(prompt: list[int]) -> list[float]:
    """The vector of a pooled request that has a large engine to itself."""
    return run_alone(prompt, max_tokens=1, pooling=True).pooled["alone"]


def run_alone(prompt: list[int], **params) -> CoreDriver:  # type: ignore[no-untyped-def]
    """A driver whose only request is over."""
    # No larger than it needs: `check` after every step is linear in blocks.
    num_blocks = 64 * int(params.get("best_of") or params.get("n") or 1)
    driver = CoreDriver(
        make_config(num_blocks=num_blocks, max_num_seqs=64, max_num_batched_tokens=4096, enable_prefix_caching=False)
    )
    driver.add("alone", prompt, **params)
    driver.run()
    return driver
