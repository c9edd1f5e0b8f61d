"""The engine tables: python -m benchmarks.gpu.engine --out FILE --mode full|eager|piecewise --tasks
single,ladder,idle,long,ragged,batch

single: one stream against the bandwidth of the weights. ladder: seconds of a decode step for several numbers of
sequences, and the host's part of it. idle: the card's gaps while it decodes. long: decodes of long sequences. ragged:
requests of lognormal lengths. batch: as many long requests as the KV cache holds against the roofline of their steps,
and the work that Transformers does as well. All with random weights in the shape of Qwen3-8B and its own context of
40,960 tokens (--max-model-len N: another); --tiny runs a tiny shape in Triton's interpreter, to try the script.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import records
from benchmarks.gpu.idle import KernelEvent, idle_shares, kernel_events, settled
from benchmarks.gpu.limits import Ceilings, Work, measure_ceilings
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.step_log import STEPS, ModelCost, Step
from benchmarks.gpu.workloads import (
    BATCH_WORK,
    HALF_BATCH_WORK,
    LONG_WORK,
    PEER_WORK,
    RAGGED_WORK,
    SINGLE_WORK,
    TINY_RAGGED,
    TINY_WORK,
    Workload,
    fitting,
)
from benchmarks.gpu.workloads import (
    Work as AnyWorkload,
)
from quire.config.options import EngineOptions
from quire.engine.front_end import open_front_end
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest
from quire.sampling_params import SamplingParams

MODES: dict[str, dict[str, object]] = {
    "full": {},
    "eager": {"enforce_eager": True},
    "piecewise": {"cuda_graphs": "piecewise"},
}
MAX_MODEL_LEN = 40960
"""Qwen3-8B's own: full graphs plan for the longest sequence, so a shorter context would flatter them."""
LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LADDER_TOKENS = 32
PROFILED_STEPS = 24
PROFILED_SEQS = 32
BATCH_SECONDS = 45.0
RAGGED_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class Run:
    """num_tokens: that came out. seconds: from the first request to the last token, or to the end of the time.
    num_preemptions: of requests whose blocks others needed; their tokens were computed twice."""

    steps: list[Step]
    num_tokens: int
    seconds: float
    is_complete: bool
    num_preemptions: int


class Engine:
    """The engine in this process, driven step by step."""

    def __init__(self, shape: Shape, options: dict[str, object], directory: Path) -> None:
        keywords = {
            "model": str(shape.write(directory)),
            "load_format": "dummy",
            "dtype": shape.dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            **options,
        }

        def start(options: EngineOptions) -> InProcessClient:
            self._client = InProcessClient(options, executor="benchmarks.gpu.step_log:make_executor")
            return self._client

        self._front_end = open_front_end(EngineOptions.from_keywords(keywords), start)
        self._numbers = count()
        self._num_preemptions = 0
        self.vocab_size = shape.vocab
        self.cost = ModelCost(
            layer_parameters=shape.layer_parameters,
            head_parameters=shape.head_parameters,
            itemsize=shape.itemsize,
            kv_bytes=shape.kv_bytes * shape.num_layers,
            attention_width=shape.num_heads * shape.head_dim * shape.num_layers,
        )

    @property
    def ready(self) -> Any:
        return self._client.ready

    @property
    def num_slots(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return int(self.ready.num_blocks * self.ready.block_size)

    def run(
        self, work: AnyWorkload, seed: int, seconds: float = float("inf"), on_step: Callable[[int], None] | None = None
    ) -> Run:
        """Greedy, past end-of-sequence. on_step: called with the number of steps so far. What is not done in time is
        aborted."""
        client, process = self._client, self._front_end.input_processor
        prompts = work.prompts(self.vocab_size, seed)
        requests = [
            process.process(str(next(self._numbers)), {"prompt_token_ids": ids}, greedy(output_len))
            for ids, output_len in zip(prompts, work.output_lens, strict=True)
        ]
        before = self._num_preemptions
        STEPS.clear()
        started = time.perf_counter()
        for request in requests:
            client.send(AddRequest(request))
        alive, num_tokens = {request.request_id for request in requests}, 0
        while alive and time.perf_counter() - started < seconds:
            outputs = client.receive()
            assert outputs is not None, "work is left"
            if outputs.stats is not None:
                self._num_preemptions = outputs.stats.preemptions_total
            num_tokens += sum(len(update.new_token_ids) for update in outputs.updates)
            alive -= {update.request_id for update in outputs.updates if update.finish_reason is not None}
            if on_step is not None:
                on_step(len(STEPS))
        elapsed = time.perf_counter() - started
        steps = [step for step in STEPS if step.finished]
        for request_id in alive:
            client.send(Abort(request_id))
        while alive and (outputs := client.receive(timeout=0.0)) is not None:
            pass
        return Run(steps, num_tokens, elapsed, not alive, self._num_preemptions - before)

    def capture_graphs(self) -> int:
        """All that are still to be captured, as an idle server does; returns how many."""
        return sum(iter(self._client.idle, False))

    def close(self) -> None:
        self._client.shutdown()


def greedy(num_tokens: int) -> SamplingParams:
    """`num_tokens` greedy tokens, past end-of-sequence."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def roofline_seconds(steps: Sequence[Step], cost: ModelCost, ceilings: Ceilings) -> float:
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

    def __init__(self, engine: Engine, ceilings: Ceilings, *, tiny: bool) -> None:
        self._engine = engine
        self._ceilings = ceilings
        self._tiny = tiny

    def ladder(self) -> Iterator[Record]:
        """After a run of each that compiles and captures. host: of a step, what the host computes while the card
        does."""
        sizes = (1, 2) if self._tiny else LADDER
        for num_seqs in sizes:
            work = Workload(num_seqs, *((5, 6) if self._tiny else (128, LADDER_TOKENS)))
            self._engine.run(work, seed=0)
            run = self._engine.run(work, seed=1)
            seconds = decode_step_seconds(run.steps, num_seqs)
            limit = median(
                roofline_seconds([step], self._engine.cost, self._ceilings)
                for step in run.steps
                if step.is_decode and step.num_seqs == num_seqs
            )
            record = {"what": "ladder", "num_seqs": num_seqs, "step_seconds": seconds, "share": limit / seconds}
            yield record | host_times(run.steps, num_seqs)

    def single(self) -> Iterator[Record]:
        """Tokens after the first."""
        work = TINY_WORK if self._tiny else SINGLE_WORK
        self._engine.run(work, seed=2)
        run = self._engine.run(work, seed=3)
        seconds = decode_step_seconds(run.steps, work.num_requests)
        cost = self._engine.cost
        weights = Work(cost.itemsize * (cost.layer_parameters + cost.head_parameters))
        yield {
            "what": "single",
            "work": str(work),
            "tokens_per_second": 1 / seconds,
            "limit": 1 / self._ceilings.seconds(weights),
            "share": self._ceilings.seconds(weights) / seconds,
        }

    def idle(self) -> Iterator[Record]:
        """Gaps between kernels over some steps in the middle of a run."""
        num_steps = 2 if self._tiny else PROFILED_STEPS
        work = Workload(2 if self._tiny else PROFILED_SEQS, 5 if self._tiny else 128, 4 * num_steps)
        self._engine.run(work, seed=4)
        gaps = self._profiled(work, num_steps)
        yield {"what": "idle", "idle": gaps.long_gaps, "all_gaps": gaps.all_gaps, "num_kernels": gaps.num_kernels}

    def _profiled(self, work: Workload, num_steps: int) -> Any:
        times = kernel_events(torch.device("cpu" if self._tiny else "cuda"))
        found: list[KernelEvent] = []

        def on_step(number: int) -> None:
            nonlocal found
            if number == num_steps:
                found = times.__enter__()
            elif number == 2 * num_steps:
                times.__exit__(None, None, None)

        self._engine.run(work, seed=5, on_step=on_step)
        return idle_shares([(event.start, event.end) for event in settled(found)])

    def long(self) -> Iterator[Record]:
        """Decodes whose time is that of keys and values."""
        yield from self._batch("long", TINY_WORK if self._tiny else self._fitting(LONG_WORK), BATCH_SECONDS)

    def ragged(self) -> Iterator[Record]:
        """Lengths as users have them, so that a step mixes short and long sequences, prompts and next tokens."""
        work = TINY_RAGGED if self._tiny else RAGGED_WORK
        self._engine.run(Workload(2, 5 if self._tiny else 600, 2), seed=11)
        run = self._engine.run(work, seed=12, seconds=RAGGED_SECONDS)
        span = run.steps[-1].finished - run.steps[0].launched
        yield {
            "what": "ragged",
            "work": str(work),
            **progress(run),
            "seconds": span,
            "share": roofline_seconds(run.steps, self._engine.cost, self._ceilings) / span,
        }

    def batch(self) -> Iterator[Record]:
        """The work that Transformers does as well, then as many long requests as the KV cache holds; and 256 shorter
        ones where those were fewer."""
        yield from self._peer_work()
        work = TINY_WORK if self._tiny else self._fitting(BATCH_WORK)
        yield from self._batch("batch", work, BATCH_SECONDS)
        if not self._tiny and work.num_requests < BATCH_WORK.num_requests:
            yield from self._batch("half batch", self._fitting(HALF_BATCH_WORK), BATCH_SECONDS)

    def _fitting(self, work: Workload) -> Workload:
        return fitting(work, self._engine.num_slots, self._engine.ready.block_size)

    def _batch(self, what: str, work: Workload, seconds: float) -> Iterator[Record]:
        self._engine.run(Workload(work.num_requests, 32 if not self._tiny else 5, 4), seed=6)
        self._engine.run(Workload(min(16, work.num_requests), work.input_len, 2), seed=7)
        run = self._engine.run(work, seed=8, seconds=seconds)
        span = run.steps[-1].finished - run.steps[0].launched
        decodes = [step for step in run.steps if step.is_decode and step.num_seqs == work.num_requests]
        yield {
            "what": what,
            "work": str(work),
            **progress(run),
            "seconds": span,
            "share": roofline_seconds(run.steps, self._engine.cost, self._ceilings) / span,
            "decode_share": self._decode_share(decodes),
        }

    def _decode_share(self, decodes: Sequence[Step]) -> float | None:
        if len(decodes) < 2:
            return None
        span = decodes[-1].finished - decodes[0].finished
        return roofline_seconds(decodes[1:], self._engine.cost, self._ceilings) / span

    def _peer_work(self) -> Iterator[Record]:
        work = TINY_WORK if self._tiny else PEER_WORK
        self._engine.run(work, seed=9)
        run = self._engine.run(work, seed=10)
        yield {
            "what": "peer work",
            "work": str(work),
            "seconds": run.seconds,
            "tokens_per_second": run.num_tokens / run.seconds,
        }


def progress(run: Run) -> Record:
    return {
        "is_complete": run.is_complete,
        "num_steps": len(run.steps),
        "num_preemptions": run.num_preemptions,
        "output_tokens_per_second": run.num_tokens / run.seconds,
    }


def host_times(steps: Sequence[Step], num_seqs: int) -> Record:
    """Medians over decode steps of `num_seqs` sequences: seconds of launching one, of waiting for its result, and of a
    step's time what the host did not wait."""
    decodes = [step for step in steps if step.is_decode and step.num_seqs == num_seqs]
    waiting = median(step.waiting for step in decodes)
    return {
        "launching": median(step.launching for step in decodes),
        "waiting": waiting,
        "host": max(0.0, decode_step_seconds(steps, num_seqs) - waiting),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, default="full")
    parser.add_argument("--tasks", default="ladder")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit = records.writer(arguments.out)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    sizes = {"num_bytes": 1 << 16, "size": 64} if arguments.tiny else {}
    ceilings, _ = measure_ceilings(device, **sizes)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        setup = engine_setup(arguments.mode, tiny=arguments.tiny, max_model_len=arguments.max_model_len)
        engine = Engine(*setup, Path(directory) / "model")
        base = {"part": "engine", "mode": arguments.mode}
        emit({**base, **started(engine)})
        emit({**base, **captured(engine, device)})
        tasks = Tasks(engine, ceilings, tiny=arguments.tiny)
        failed = False
        for name in arguments.tasks.split(","):
            try:
                for record in getattr(tasks, name)():
                    emit({**base, **record})
            except Exception as error:
                failed = True
                emit({**base, "what": f"{name} failed", "error": f"{type(error).__name__}: {str(error)[:500]}"})
        engine.close()
    if failed:
        raise SystemExit(1)


def started(engine: Engine) -> Record:
    return {
        "what": "ready",
        "seconds": sum(engine.ready.seconds.values()),
        "backend": engine.ready.backend,
        "num_slots": engine.num_slots,
        "max_model_len": engine.ready.max_model_len,
    }


def captured(engine: Engine, device: torch.device) -> Record:
    """All graphs: how many, seconds, and bytes that the device has less. Captured between steps they would be part of
    what is measured."""
    started, free = time.perf_counter(), free_bytes(device)
    number = engine.capture_graphs()
    seconds = time.perf_counter() - started
    return {"what": "graphs", "number": number, "seconds": seconds, "bytes": free - free_bytes(device)}


def free_bytes(device: torch.device) -> int:
    """Of a card; 0 of a host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def engine_setup(mode: str, *, tiny: bool, max_model_len: int = MAX_MODEL_LEN) -> tuple[Shape, dict[str, object]]:
    """The shape, and the options of the engine that runs it."""
    if tiny:
        sizes = {"max_model_len": 64, "num_blocks_override": 40, "max_num_seqs": 4}
        return TINY, {"device": "cpu", "attention_backend": "triton", **sizes}
    return QWEN3_8B, {"device": "cuda", "max_model_len": max_model_len, "max_num_seqs": 256, **MODES[mode]}


if __name__ == "__main__":
    main()
