"""One engine in one process: python -m benchmarks.gpu.engine --out FILE [--format bf16|fp8] [--tiny]

Time to be ready; one stream; decode steps of 1, 32 and 256 sequences, with the host's part; decodes of long sequences;
prompts of 8K and 32K; time of a step by kernel. Random weights in Qwen3-8B's shape with its context of 40,960 tokens.
--format fp8: 8-bit weights, and what they change. --tiny: a tiny shape in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.gpu import records
from benchmarks.gpu.limits import Ceilings, measure_ceilings
from benchmarks.gpu.profiling import KernelEvent, breakdown, kernel_events
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.step_log import STEPS, ModelCost, Step, StepCost
from benchmarks.gpu.workloads import Work as AnyWork
from benchmarks.gpu.workloads import Workload
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.engine.front_end import open_front_end
from quire.engine.inprocess_client import InProcessClient
from quire.engine.input_processor import TokensPrompt
from quire.engine.messages import Abort, AddRequest
from quire.kv_cache.stats import EngineStats
from quire.sampling_params import SamplingParams

WHERE: dict[bool, dict[str, Any]] = {
    # Qwen3-8B's own context: full graphs plan for the longest sequence, so a shorter one would flatter them.
    False: {"device": "cuda", "max_model_len": 40960, "max_num_seqs": 256},
    True: {
        "device": "cpu",
        "attention_backend": "triton",
        "max_model_len": 64,
        "num_blocks_override": 40,
        "max_num_seqs": 4,
    },
}
"""Options of the engine on a card, and of the tiny one."""
GRAPH_SIZES = [1, 8, 32, 128, 256]
STEP_SIZES = (1, 32, 256)
STEP_TOKENS = 32
PROFILED_PROMPT, PROFILED_STEPS = 1024, 8
TASKS = {"bf16": ("single", "steps", "long", "prompts", "kernels"), "fp8": ("single", "steps", "prompts")}


class AnyShape(Protocol):
    """A model that can be written down as a configuration."""

    @property
    def dtype(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    def write(self, directory: Path) -> Path: ...


@dataclass(frozen=True, slots=True)
class Run:
    """token_ids: of each request. seconds: from the first request to the last token. num_preemptions: of requests whose
    blocks others needed; their tokens were computed twice. num_drafts, num_accepted: of all steps."""

    steps: list[Step]
    token_ids: list[list[int]]
    seconds: float
    num_preemptions: int
    num_drafts: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def span(self) -> float:
        """Seconds from the launch of the first step to the result of the last."""
        return self.steps[-1].finished - self.steps[0].launched


class Engine:
    """The engine in this process, driven step by step."""

    def __init__(self, shape: AnyShape, options: dict[str, Any], directory: Path, cost: StepCost | None = None) -> None:
        """cost: of steps; by default that of a dense model of this shape."""
        keywords = {
            "model": str(shape.write(directory)),
            "load_format": "dummy",
            "dtype": shape.dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            **options,
        }

        def start(options: EngineOptions, config: EngineConfig) -> InProcessClient:
            executor = "benchmarks.gpu.step_log:make_executor"
            self._client = InProcessClient(options, executor=executor, config=config)
            return self._client

        self._front_end = open_front_end(EngineOptions.from_keywords(keywords), start)
        self._numbers = count()
        self._stats = EngineStats()
        self.vocab_size = shape.vocab
        itemsize = shape.itemsize if keywords.get("quantization") is None else 1
        if cost is None:
            assert isinstance(shape, Shape), "another shape says what its steps cost"
            cost = ModelCost.of_shape(shape, itemsize)
        self.cost = cost

    @property
    def ready(self) -> Any:
        return self._client.ready

    def run(self, work: AnyWork, seed: int, on_step: Callable[[int], None] | None = None) -> Run:
        """Greedy, past end-of-sequence. on_step: called with the number of steps so far."""
        return self.complete(work.prompts(self.vocab_size, seed), map(greedy, work.output_lens), on_step)

    def complete(
        self,
        prompts: Sequence[list[int]],
        params: Iterable[SamplingParams],
        on_step: Callable[[int], None] | None = None,
        predicted: Sequence[list[int]] = (),
    ) -> Run:
        """One sequence for each prompt. on_step: as above. predicted: the output of each, for an oracle."""
        client, process = self._client, self._front_end.input_processor
        inputs: list[TokensPrompt] = [{"prompt_token_ids": ids} for ids in prompts]
        for given, text in zip(inputs, predicted, strict=False):
            given["prediction"] = text
        requests = [
            process.process(str(next(self._numbers)), given, each) for given, each in zip(inputs, params, strict=True)
        ]
        before = self._stats
        STEPS.clear()
        started = time.perf_counter()
        for request in requests:
            client.send(AddRequest(request))
        token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        alive = set(token_ids)
        try:
            while alive:
                outputs = client.receive()
                assert outputs is not None, "work is left"
                if outputs.stats is not None:
                    self._stats = outputs.stats
                for update in outputs.updates:
                    token_ids[update.request_id] += update.new_token_ids
                alive -= {update.request_id for update in outputs.updates if update.finish_reason is not None}
                if on_step is not None:
                    on_step(len(STEPS))
        finally:
            for request_id in alive:
                client.send(Abort(request_id))
        steps, elapsed = [step for step in STEPS if step.finished], time.perf_counter() - started
        stats = self._stats
        return Run(
            steps,
            list(token_ids.values()),
            elapsed,
            stats.preemptions_total - before.preemptions_total,
            stats.draft_tokens_total - before.draft_tokens_total,
            stats.accepted_draft_tokens_total - before.accepted_draft_tokens_total,
        )

    def capture_graphs(self) -> int:
        """All that are still to be captured, as an idle server does; returns how many."""
        return sum(iter(self._client.idle, False))

    def close(self) -> None:
        self._client.shutdown()


def greedy(num_tokens: int) -> SamplingParams:
    """`num_tokens` greedy tokens, past end-of-sequence."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def roofline_seconds(steps: Sequence[Step], cost: StepCost, ceilings: Ceilings) -> float:
    """The least time that these steps can take, one after the other."""
    return sum(ceilings.seconds(cost.work(step)) for step in steps)


def decode_step_seconds(steps: Sequence[Step], num_seqs: int) -> float:
    """Median time from one result to the next, while `num_seqs` sequences decode. Raises ValueError without such
    steps."""
    steady = [
        after.finished - before.finished
        for before, after in pairwise(steps)
        if before.is_decode and after.is_decode and before.num_seqs == after.num_seqs == num_seqs
    ]
    if not steady:
        raise ValueError(f"no two decode steps of {num_seqs} sequences in a row")
    return median(steady)


class Tasks:
    """What is measured, by name; each gives records."""

    def __init__(self, engine: Engine, ceilings: Ceilings, device: torch.device) -> None:
        self._engine, self._ceilings, self._device = engine, ceilings, device
        self._tiny = device.type == "cpu"
        self._step_sizes = (1, 2) if self._tiny else STEP_SIZES

    def single(self) -> Iterator[Record]:
        """Tokens after the first."""
        yield from self._decodes("single", Workload(1, 5, 6) if self._tiny else Workload(1, 128, 256))

    def steps(self) -> Iterator[Record]:
        """Short sequences: the weights, and what surrounds them."""
        for num_seqs in self._step_sizes:
            lengths = (5, 6) if self._tiny else (128, STEP_TOKENS)
            yield from self._decodes("step", Workload(num_seqs, *lengths))

    def long(self) -> Iterator[Record]:
        """Decodes whose time is that of keys and values."""
        # The first sequence gets tokens while the last one's prompt is computed: 32 steps and a few more.
        yield from self._decodes("long", Workload(2, 30, 4) if self._tiny else Workload(32, 8192, 64), warms=False)

    def prompts(self, longest: int = 32768) -> Iterator[Record]:
        """One prompt, in as many steps as the scheduler makes of it."""
        for length in (20, 40) if self._tiny else (each for each in (8192, 32768) if each <= longest):
            runs = [self._engine.run(Workload(1, length, 1), seed) for seed in range(2)]
            best = min(runs, key=lambda run: run.span)
            share = roofline_seconds(best.steps, self._engine.cost, self._ceilings) / best.span
            yield {"what": "prompt", "num_tokens": length, "seconds": best.span, "share": share}

    def _decodes(self, what: str, work: Workload, *, warms: bool = True) -> Iterator[Record]:
        """host: seconds of a step that the host did not wait for the card."""
        if warms:
            self._engine.run(work, seed=2)
        run = self._engine.run(work, seed=3)
        steps = [step for step in run.steps if step.is_decode and step.num_seqs == work.num_requests]
        seconds = decode_step_seconds(run.steps, work.num_requests)
        limit = median(roofline_seconds([step], self._engine.cost, self._ceilings) for step in steps)
        yield {
            "what": what,
            "work": str(work),
            "num_seqs": work.num_requests,
            "step_seconds": seconds,
            "share": limit / seconds,
            "launching": median(step.launching for step in steps),
            "host": max(0.0, seconds - median(step.waiting for step in steps)),
            "num_preemptions": run.num_preemptions,
        }

    def kernels(self, sizes: Sequence[int] = ()) -> Iterator[Record]:
        """Steps of 1, 32 and 256 sequences (or `sizes`) of 1,024 tokens under the profiler."""
        num_steps, prompt = (2, 5) if self._tiny else (PROFILED_STEPS, PROFILED_PROMPT)
        for num_seqs in sizes or self._step_sizes:
            budget = 8192 if not self._tiny else 64
            begin = -(-num_seqs * prompt // (budget - num_seqs)) + num_steps
            # The first sequence gets a token in each step while the last one's prompt is computed: it must not end
            # before the profile does.
            work = Workload(num_seqs, prompt, begin + 3 * num_steps)
            events = breakdown(self._profiled(work, begin, num_steps), num_steps)
            yield {"what": "breakdown", "num_seqs": num_seqs, **events}

    def _profiled(self, work: Workload, begin: int, num_steps: int) -> list[KernelEvent]:
        profile = kernel_events(self._device)
        found: list[KernelEvent] = []

        def on_step(number: int) -> None:
            nonlocal found
            if number == begin:
                found = profile.__enter__()
            elif number == begin + num_steps:
                profile.__exit__(None, None, None)

        self._engine.run(work, seed=5, on_step=on_step)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=tuple(TASKS), default="bf16")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit, tiny = records.writer(arguments.out), arguments.tiny
    base = {"part": "engine" if arguments.format == "bf16" else arguments.format, "format": arguments.format}
    device = torch.device("cpu" if tiny else "cuda")
    ceilings, _ = measure_ceilings(device, **({"num_bytes": 1 << 16, "size": 64} if tiny else {}))
    emit({**base, "what": "limits", "bandwidth": ceilings.bandwidth, "peak": ceilings.peak})
    torch.cuda.empty_cache()
    options = WHERE[tiny] | ({} if tiny else {"cuda_graphs": "full", "cuda_graph_sizes": GRAPH_SIZES})
    if arguments.format != "bf16":
        options |= {"quantization": arguments.format}
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        engine = Engine(TINY if tiny else QWEN3_8B, options, Path(directory) / "model")
        emit({**base, **started(engine, began)})
        tasks = Tasks(engine, ceilings, device)
        for name in TASKS[arguments.format]:
            try:
                for record in getattr(tasks, name)():
                    emit({**base, **record})
            except Exception as error:
                failed = True
                emit({**base, "what": name, "error": f"{type(error).__name__}: {str(error)[:500]}"})
        engine.close()
    if failed:
        raise SystemExit(1)


def started(engine: Engine, began: float) -> Record:
    """Seconds until it is ready, and of its graphs, which are captured now: between steps they would be part of what is
    measured."""
    ready, before = engine.ready, time.perf_counter()
    number = engine.capture_graphs()
    return {
        "what": "ready",
        "seconds": before - began,
        "of_which": dict(ready.seconds),
        "backend": ready.backend,
        "num_slots": int(ready.num_blocks * ready.block_size),
        "num_graphs": number,
        "graph_seconds": time.perf_counter() - before,
    }


if __name__ == "__main__":
    main()
