"""One turn of an engine core, shared by the in-process client and the engine process."""

from __future__ import annotations

from collections.abc import Iterable

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.decoding.masks import NO_MASKS, MaskSource
from quire.engine.core import EngineCore
from quire.engine.messages import ClientMessage, EngineOutputs
from quire.engine.output_window import OutputWindow
from quire.engine.step_log import StepLog
from quire.engine.steps import OWN_STEPS, StepCount
from quire.executors.interface import KeepsTime
from quire.registry import load_target
from quire.scheduler.interface import SchedulerFactory, paged_scheduler
from quire.structured_output.service import ConstraintService


def build_core(
    options: EngineOptions,
    executor: str,
    make_scheduler: SchedulerFactory = paged_scheduler,
    config: EngineConfig | None = None,
    steps: StepCount = OWN_STEPS,
) -> EngineCore:
    """Build a core: resolve the options, load the model, size the cache. Raises ConfigError, ModelLoadError or
    InsufficientMemoryError. executor: `"module:attribute"`, imported here. make_scheduler: see EngineCore. config:
    resolved `options`, if known. steps: see EngineCore."""
    config = resolve(options) if config is None else config
    observers = [] if config.step_log is None else [StepLog(config, config.step_log, SystemClock())]
    workers = load_target(executor)(config)
    clock = workers.agreed_clock if isinstance(workers, KeepsTime) else SystemClock()
    return EngineCore(config, workers, clock, make_scheduler, _masks(options, config), observers, steps)


def _masks(options: EngineOptions, config: EngineConfig) -> MaskSource:
    if config.model.pooling is not None or options.skip_tokenizer_init or config.executor == "external_launcher":
        return NO_MASKS  # external_launcher: masks would arrive at different steps on different ranks
    return ConstraintService(options, config.model.vocab_size, config.model.eos_token_ids)


def advance(core: EngineCore, messages: Iterable[ClientMessage], window: OutputWindow) -> EngineOutputs | None:
    """Handle `messages`, then run one step if there is work. Returns None if there is nothing to send yet.

    Outputs carry statistics if messages were handled or a request starts or ends, otherwise rarely.
    """
    handled = False
    results = []
    for message in messages:
        handled = True
        result = core.handle(message)
        if result is not None:
            results.append(result)
    outputs: EngineOutputs | None
    if core.has_work:
        outputs = window.joined(core.step(), goes_on=not results and core.has_work)
        if outputs is None:
            return None
    elif handled:
        outputs = EngineOutputs()
    else:
        return None
    if handled or window.wants_stats(outputs):
        outputs.stats = core.stats()
    outputs.results.extend(results)
    return outputs
