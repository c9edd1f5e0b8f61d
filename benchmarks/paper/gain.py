"""What paging gains on this machine: one batch of requests through the real engine, with the product's scheduler and
with Orca's, over the same small pool of KV blocks.

The model has the shape of OPT-125M and random weights: what it says is of no interest, and each system says the same,
which is checked. Context, pool and lengths are the paper's (Fig. 13a) divided by four, so that the batches are the
paper's, too.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, PAGED, SYSTEMS
from benchmarks.paper.figure import Row
from benchmarks.paper.workloads import PaperRequest
from quire.config.options import EngineOptions
from quire.engine.core import EngineCore
from quire.engine.loop import build_core
from quire.engine.messages import AddRequest
from quire.errors import QuireError
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.workloads import LONGEST_INPUT, LONGEST_OUTPUT, SHAREGPT, lengths, uncorrelated

SCALE = 4
"""Everything that counts tokens is the paper's divided by this."""
MAX_MODEL_LEN = 2048 // SCALE
NUM_BLOCKS = 15_700 // SCALE // 16
_WHY = "a small model on few cores: a larger batch takes nearly as much longer, as products are bound by arithmetic"
COMPARED = (ORCA_MAX, ORCA_POW2, ORCA_ORACLE, PAGED)
OPT_125M = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True, "activation_function": "relu", "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gain:
    """One system's run. mean_running: requests side by side, averaged over steps."""

    system: str
    seconds: float
    num_tokens: int
    num_steps: int
    mean_running: float

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds


BATCHES = {ORCA_MAX: 7.0, ORCA_POW2: 9.8, ORCA_ORACLE: 13.6, PAGED: 30.4}
"""Of Fig. 13a."""
LEAST_GAINS = {ORCA_MAX: 2.7, ORCA_ORACLE: 1.7}
"""Of Fig. 12: the least of the paper's ratios of rates on ShareGPT."""


def rows(gains: Sequence[Gain]) -> list[Row]:
    """What of the runs the paper has a number for."""
    by_system = {each.system: each for each in gains}
    paged = by_system[PAGED]
    found = [
        Row("Fig. 13a", f"engine, a quarter of the lengths: requests in the batch, {system}",
            by_system[system].mean_running, paper, "")
        for system, paper in BATCHES.items()
    ]  # fmt: skip
    found += [
        Row("Fig. 12", f"engine, a quarter of the lengths: tokens/s over those of {system}",
            paged.throughput / by_system[system].throughput, paper, why=_WHY)
        for system, paper in LEAST_GAINS.items()
    ]  # fmt: skip
    return found


def requests(count: int, seed: int) -> list[PaperRequest]:
    """ShareGPT-shaped requests, SCALE times shorter, of random tokens."""
    rng = random.Random(seed)
    inputs = lengths(SHAREGPT.mean_input / SCALE, count, LONGEST_INPUT // SCALE)
    outputs = lengths(SHAREGPT.mean_output / SCALE, count, LONGEST_OUTPUT // SCALE)
    vocabulary = range(3, 50_000)
    return [
        PaperRequest(rng.choices(vocabulary, k=input_len), output_len)
        for input_len, output_len in uncorrelated(inputs, outputs, rng)
    ]


@contextmanager
def dummy_model() -> Iterator[Path]:
    """A directory with the configuration of OPT-125M, for `load_format="dummy"`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(OPT_125M), encoding="utf-8")
        yield Path(folder)


def measure(
    model: Path,
    executor: str,
    work: Sequence[PaperRequest],
    *,
    num_rounds: int = 1,
    num_threads: int | None,
    on_done: Callable[[int], None],
) -> list[Gain]:
    """Run all systems in turns, each time on an engine of its own; of each system the run of median length counts.

    num_rounds: odd. on_done: told how many requests each step finished. Raises QuireError when two runs generate
    different tokens.
    """
    runs: list[Gain] = []
    expected: dict[str, list[int]] | None = None
    for system in COMPARED * num_rounds:
        options = EngineOptions(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            num_blocks_override=NUM_BLOCKS,
            max_num_seqs=64,
            enable_prefix_caching=False,
            num_threads=num_threads,
        )
        core = build_core(options, executor, SYSTEMS[system])
        try:
            gain, tokens = _run(core, system, work, on_done)
        finally:
            core.shutdown()
        if expected is not None and tokens != expected:
            raise QuireError(f"{system} generated other tokens than {runs[-1].system}")
        expected = tokens
        runs.append(gain)
    return [
        sorted((run for run in runs if run.system == system), key=lambda run: run.seconds)[num_rounds // 2]
        for system in COMPARED
    ]


def _run(
    core: EngineCore, system: str, work: Sequence[PaperRequest], on_done: Callable[[int], None]
) -> tuple[Gain, dict[str, list[int]]]:
    """Everything arrives at once; timed from the first step to the last token."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    for number, request in enumerate(work):
        source = EngineRequest(
            request_id=str(number),
            prompt_token_ids=request.token_ids,
            params=params,
            max_tokens=request.output_len,
            seed=number,
        )
        core.handle(AddRequest(source))
    tokens: dict[str, list[int]] = {}
    num_steps = running = num_finished = 0
    started = time.perf_counter()
    while core.has_work:
        outputs = core.step()
        for rejected in outputs.rejections:
            raise QuireError(f"the engine refused {rejected.request_id}: {rejected.message}")
        for update in outputs.updates:
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
        stats = core.stats()
        on_done(stats.finished_requests_total - num_finished)
        num_finished = stats.finished_requests_total
        running += stats.num_running
        num_steps += 1
    seconds = time.perf_counter() - started
    return Gain(system, seconds, sum(map(len, tokens.values())), num_steps, running / num_steps), tokens
