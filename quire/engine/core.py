"""Engine core: schedule, execute, update. It knows no HTTP, text or torch, and reads time only from its Clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

from quire.clock import Clock
from quire.config.engine import EngineConfig
from quire.decoding.masks import NO_MASKS, Constraint, MaskSource
from quire.decoding.thinking_budget import BudgetConstraint
from quire.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallResult,
    ClientMessage,
    EngineOutputs,
    EngineReady,
    RequestRejected,
    Shutdown,
)
from quire.engine.observer import CoreObserver
from quire.engine.sleep import Pause, Sleep
from quire.engine.steps import OWN_STEPS, StepCount
from quire.errors import (
    ConfigError,
    EngineAsleepError,
    InsufficientMemoryError,
    ModelLoadError,
    QuireError,
    UserError,
)
from quire.executors.interface import Executor, StepFuture, VitalSigns
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.sizing import size_pool
from quire.kv_cache.spec import LayerSpec
from quire.kv_cache.stage_layout import most_pages
from quire.kv_cache.stats import EngineStats
from quire.logging import get_logger
from quire.outputs import SequenceUpdate
from quire.scheduler.interface import EngineScheduler, SchedulerFactory, paged_scheduler
from quire.step import StepPlan

logger = get_logger(__name__)

IDLE_CHECK_SECONDS = 10.0
"""Minimum seconds between invariant checks when idle; one is linear in blocks."""
FIRST_REPORTS = 50
"""Maximum transfer plans at the start until the KV connector has listed its blocks."""
BLOCKED_SECONDS = 0.005
"""Seconds that a driver sleeps while the core `is_blocked`, unless a message comes."""
PATIENCE = 0.001
"""Seconds that planning of a step waits for matchers."""
LATE_SECONDS = 0.005
"""Seconds that a step in flight waits for masks."""
BRIEF_SECONDS = 0.005
"""Longest step, in seconds, after which quick matchers (0.1 ms) answer during the next."""
ANSWER_SECONDS = 0.002
"""Seconds that a step without anything to compute waits for a matcher."""
LAST_TRANSFERS = 100
"""Maximum transfer plans at shutdown, for blocks not yet stored or sent."""


class EngineCore:
    """One model, one scheduler, one executor, driven by one thread: `handle` messages, then `step` while `has_work`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        make_scheduler: SchedulerFactory = paged_scheduler,
        masks: MaskSource = NO_MASKS,
        observers: Sequence[CoreObserver] = (),
        steps: StepCount = OWN_STEPS,
    ) -> None:
        """Load the model and size the KV cache. Raises ModelLoadError or InsufficientMemoryError. make_scheduler:
        another policy over the same pool, for comparisons (benchmarks/baselines/). masks: source of the masks of
        constrained requests. steps: count of the steps that begin, which other replicas may have to join."""
        self._clock = clock
        self._steps = steps
        self._num_joined = 0
        self._is_draining = False
        self._executor = executor
        self._observers = observers
        self._queue_depth = config.scheduler.queue_depth
        self._has_stages = config.parallel.pp > 1
        self.output_window = config.output_window
        self._vocab_size = config.model.vocab_size
        self._in_flight: deque[StepFuture] = deque()
        self._masks = masks
        self._unsent: StepPlan | None = None
        """Last plan in flight, while it lacks its sampling inputs."""
        self._rejections: list[RequestRejected] = []
        self._ended: list[SequenceUpdate] = []
        """Final updates of requests ended by a call, for the next step to report."""
        self._next_check = 0.0
        self._is_stepping = False
        self.is_blocked = False
        """True if the last step had nothing to compute: all live requests wait for something outside."""
        layers = config.model.shape.layers if config.load.counts_experts else ()
        self._expert_layers = [number for number, layer in enumerate(layers) if layer.experts is not None]
        self._has_moving_experts = config.load.balance is not None
        started = clock.now()
        specs = executor.load_model()
        loaded = clock.now()
        layout = self._allocate(config, specs)
        seconds = {"load model": loaded - started, "size and allocate KV cache": clock.now() - loaded}
        costs = executor.measure_preemption_costs() if config.scheduler.preemption_mode == "auto" else None
        self.scheduler: EngineScheduler = make_scheduler(config, layout, costs)
        self._await_connector()
        self._sleep = Sleep(executor, self.scheduler, self._finish_transfers)
        self._pause = Pause(self.scheduler)
        self.ready = self._readiness(config.model.max_model_len, layout, seconds)
        steps.arrive()

    def computing(self) -> AbstractContextManager[object]:
        """Context of many `step` calls, quicker if entered once for all (`Executor.computing`)."""
        return self._executor.computing()

    @property
    def has_work(self) -> bool:
        """True if `step` would do anything."""
        reports = self._rejections or self._ended
        if self._in_flight or reports or self.scheduler.has_requests or self.scheduler.kv.has_transfers:
            return True
        return self._steps.is_behind

    def handle(self, message: ClientMessage) -> CallResult | None:
        """Handle one message. Returns the result of a Call; a rejected request is reported by the next `step`."""
        match message:
            case AddRequest(request):
                try:
                    self._sleep.check_awake()
                    constraint: Constraint | None = None
                    if request.constraint:
                        constraint = self._masks.constraint(request.constraint, request.client)
                    if request.thinking_budget is not None:
                        constraint = BudgetConstraint(constraint, request.thinking_budget, self._vocab_size)
                    self.scheduler.add_request(request, self._clock.now(), constraint)
                except UserError as error:
                    self._rejections.append(RequestRejected(request.request_id, error.message, error.param))
                except EngineAsleepError as error:
                    self._rejections.append(RequestRejected(request.request_id, str(error), is_asleep=True))
            case Abort(request_id, index):
                self.scheduler.abort(request_id, index)
            case Call():
                for observer in self._observers:
                    observer.calls(message)
                return self._call(message.call_id, message.method, message.argument)
            case Shutdown():
                self.shutdown()
        return None

    def step(self) -> EngineOutputs:
        """End expired requests, plan and start steps until as many as allowed are running, then process the oldest's
        result."""
        self._is_stepping = True
        began = self._clock.now()
        updates, self._ended = self._ended + self.scheduler.expire(began), []
        outputs = EngineOutputs(updates=updates)
        if self.scheduler.awaits_others:
            self._settle(outputs)
        self._start_steps(outputs)
        if not self._in_flight and self.scheduler.awaits_answers:
            self._masks.wait_answer(ANSWER_SECONDS)
            self._settle(outputs)
            self._start_steps(outputs)
        outputs.rejections, self._rejections = self._rejections, []
        self.is_blocked = not self._in_flight and self.scheduler.has_requests and not self.scheduler.awaits_answers
        if self._in_flight:
            result = self._in_flight.popleft().result()
            now = self._clock.now()
            may_go_ahead = not self._in_flight and now - began <= BRIEF_SECONDS
            if result.step_id >= 0:  # else a step of other replicas
                outputs.updates += self.scheduler.update(result, now, may_go_ahead=may_go_ahead)
            if self.scheduler.awaits_others:
                self._settle(outputs)
            elif self.scheduler.awaits_answers:
                self._masks.flush()
            if self._unsent is not None:
                self._send_sampling_inputs(outputs)
        if not (self._in_flight or self.scheduler.has_requests) and self.scheduler.kv.can_transfer:
            self._transfer()  # now: after its last request the caller may not call again
        self._is_stepping = False
        return outputs

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def idle(self) -> bool:
        """Do one piece of deferred work (capture a CUDA graph, prepare grammars) while there is nothing else to do;
        returns whether there was any."""
        if self.has_work or self._sleep.level:
            return False
        if self._executor.idle():
            return True
        self._masks.idle()
        return False

    def vital_signs(self) -> VitalSigns:
        """Workers' seconds since their last progress, for the heartbeat. Any thread may call this."""
        return self._executor.vital_signs()

    def shutdown(self) -> None:
        """Drop all requests and release the executor. Idempotent."""
        self._in_flight.clear()
        if not self._is_stepping:  # after a failed step the workers accept no more plans
            self._is_stepping = True
            self._finish_transfers()
        self._masks.close()
        self._executor.shutdown()
        self._steps.close()
        observers, self._observers = self._observers, ()
        for observer in observers:
            observer.ends()

    def _allocate(self, config: EngineConfig, specs: list[LayerSpec]) -> KVCacheLayout:
        executor, cache, limits = self._executor, config.cache, config.scheduler
        groups, layers_per_group = group_layers(specs, cache.block_size, cache.state_snapshot_interval)
        if self._has_stages:
            layers_per_group = most_pages(groups, config.model.shape.stages(config.parallel.pp))
        profile = None
        if groups and not cache.is_size_given:
            profile = executor.profile(limits.max_num_batched_tokens, limits.max_num_seqs)
        sizes = {"max_model_len": config.model.max_model_len, "max_num_seqs": limits.max_num_seqs}
        layout = size_pool(groups, layers_per_group, cache, profile, **sizes)
        executor.allocate(layout)
        for observer in self._observers:
            observer.allocated(layout, executor.describe_backend())
        return layout

    def _readiness(self, wanted: int, layout: KVCacheLayout, seconds: dict[str, float]) -> EngineReady:
        max_model_len = self.scheduler.longest_sequence(wanted)
        if max_model_len < 2:
            raise InsufficientMemoryError(
                f"the KV cache has {layout.num_usable_blocks} blocks of {layout.sequence_block} tokens, too few for a "
                "prompt of one token and one new token: give it more memory"
            )
        if max_model_len < wanted:
            logger.warning(
                "max_model_len is lowered from %d to %d: the KV cache has %d blocks of %d tokens",
                wanted,
                max_model_len,
                layout.num_usable_blocks,
                layout.sequence_block,
            )
        return EngineReady(
            max_model_len=max_model_len,
            num_blocks=layout.num_usable_blocks,
            block_size=layout.sequence_block,
            seconds=seconds,
            backend=self._executor.describe_backend(),
            max_concurrency=layout.num_usable_blocks / max(1, self.scheduler.most_blocks(max_model_len)),
        )

    def _execute(self, plan: StepPlan) -> StepFuture:
        ends = [observer.executes(plan) for observer in self._observers]
        future = self._executor.execute(plan)
        for end in ends:
            if end is not None:
                future.add_done_callback(end)
        return future

    def _start_steps(self, outputs: EngineOutputs) -> None:
        while len(self._in_flight) < self._queue_depth and self._unsent is None:
            waits = self._pause.stops_all or not self._steps.may_begin
            plan = None if waits else self.scheduler.schedule(self._clock.now())
            if plan is None and self._steps.is_behind and not self._is_draining:
                self._num_joined += 1
                dummy = StepPlan(-self._num_joined, [], [], [], [], [], is_dummy=True)
                self._steps.count_step()
                self._in_flight.append(self._executor.execute(dummy))
                continue
            if plan is None:
                break
            if plan.seq_ids:
                self._steps.count_step()
            self._in_flight.append(self._execute(plan) if self._observers else self._executor.execute(plan))
            if plan.masked_samples:
                self._unsent = plan
                self._send_sampling_inputs(outputs)

    def _send_sampling_inputs(self, outputs: EngineOutputs) -> None:
        """Send the workers the last plan's masks of allowed tokens (sampling inputs), unless they depend on the result
        of an earlier plan. Waits for masks for at most LATE_SECONDS."""
        if self._unsent is not None and (self._has_stages or len(self._in_flight) == 1):
            plan, self._unsent = self._unsent, None
            deadline = self._clock.now() + LATE_SECONDS if self.scheduler.can_discard else math.inf
            while self.scheduler.awaits_masks(plan) and self._clock.now() < deadline:
                self._masks.wait_answer(ANSWER_SECONDS)
                self._take_answers(outputs)
            inputs = self.scheduler.sampling_inputs(plan)
            for observer in self._observers:
                observer.sends(inputs)
            self._executor.send_sampling_inputs(inputs)

    def _settle(self, outputs: EngineOutputs) -> None:
        asked = self.scheduler.awaited()
        while True:
            self._masks.flush()
            self._masks.wait(asked, PATIENCE)
            self._take_answers(outputs)
            asked = [matcher for matcher in self.scheduler.awaited() if matcher not in asked]
            if not asked:
                return  # a beam search's answers can lead to further questions

    def _take_answers(self, outputs: EngineOutputs) -> None:
        updates, refused = self.scheduler.settle(self._clock.now())
        outputs.updates += updates
        for request_id, error in refused:
            self._rejections.append(RequestRejected(request_id, error.message, error.param))

    def _finish_steps(self) -> None:
        self._is_draining = True
        while self._in_flight and not self.scheduler.has_requests:
            outputs = self.step()
            self._ended += outputs.updates
            self._rejections = outputs.rejections + self._rejections
        self._is_draining = False

    def _finish_transfers(self) -> bool:
        for _ in range(LAST_TRANSFERS):
            if not self.scheduler.kv.has_transfers:
                return True
            self._transfer()
        return not self.scheduler.kv.has_transfers

    def _transfer(self, *, awaits_report: bool = False) -> None:
        plan = self.scheduler.schedule_transfers(awaits_report=awaits_report)
        if plan is not None:
            self.scheduler.update(self._execute(plan).result(), self._clock.now())

    def _await_connector(self) -> None:
        for _ in range(FIRST_REPORTS):
            if self.scheduler.kv.knows_stored:
                break
            self._transfer(awaits_report=True)

    def _call(self, call_id: int, method: str, argument: str) -> CallResult:
        try:
            return self._answer(call_id, method, argument)
        except QuireError as error:
            # Errors of the model or of memory are not the caller's mistakes.
            is_internal = not isinstance(error, UserError) or isinstance(error, ModelLoadError | ConfigError)
            return CallResult(call_id, error=str(error), is_internal=is_internal)

    def _answer(self, call_id: int, method: str, argument: str) -> CallResult:
        match method:
            case "stats":
                return CallResult(call_id, self._full_stats())
            case "check":
                self.scheduler.check()
                return CallResult(call_id, 0)
            case "kv_snapshot":
                return CallResult(call_id, kv=self.scheduler.snapshot(self._clock.now()))
            case "reset_prefix_cache":
                return CallResult(call_id, self.scheduler.kv.reset_prefix_cache())
            case "unregister_prefix":
                return CallResult(call_id, self.scheduler.unregister_prefix(argument))
            case "sleep":
                if self._steps.are_common and argument == "2":
                    raise UserError("sleep at level 2 is not possible: other replicas need this one's experts")
                self._finish_steps()
                self._sleep.fall_asleep(argument)
                return CallResult(call_id, self._sleep.level)
            case "wake_up":
                self._sleep.wake_up(argument)
                return CallResult(call_id, self._sleep.level)
            case "is_sleeping":
                return CallResult(call_id, int(self._sleep.level > 0))
            case "pause":
                self._pause.hold(argument)
                return CallResult(call_id, 0)
            case "resume":
                self._pause.end()
                return CallResult(call_id, 0)
            case "is_paused":
                return CallResult(call_id, self._pause.level)
            case "abort_all":
                ended = self.scheduler.abort_all(self._clock.now())
                self._ended += ended
                return CallResult(call_id, len(ended))
        return CallResult(call_id, error=f"unknown method {method!r}")

    def _full_stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._expert_layers:
            stats.expert_counts = dict(zip(self._expert_layers, self._executor.expert_counts(), strict=True))
        if self._has_moving_experts:
            stats.expert_ranks = dict(zip(self._expert_layers, self._executor.expert_ranks(), strict=True))
        return stats

    def check_when_idle(self) -> None:
        """Check the scheduler's invariants if no work is left, at most every IDLE_CHECK_SECONDS. Called by the loop
        that drives the core."""
        now = self._clock.now()
        if not self.has_work and now >= self._next_check:
            self._next_check = now + IDLE_CHECK_SECONDS
            self.scheduler.check()
