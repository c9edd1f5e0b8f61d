"""Drafts: python -m benchmarks.gpu.drafts --out FILE [--methods ngram,model,parallel,head] [--tiny]

Engines of Qwen3-8B's shape and random weights, without drafts and with them, in turn, with the same requests: greedy
and sampled, one sequence and several. n-grams: prompts that repeat themselves, of so few tokens that some drafts are
right. model: a model of 1/20 the bytes drafts, parallel: in one pass (PARD), head: an EAGLE-3 head; an oracle replaces
drafts by the tokens of the run without, right with probability 0.7. Under `batch_invariant` tokens must be equal; time
by step and by token. --tiny: a tiny shape in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import records
from benchmarks.gpu.engine import WHERE, Engine, Run
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.workloads import random_prompts
from quire.sampling_params import SamplingParams

NUM_DRAFTS = 3
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
ALLOWED = [11, 12, 13, 14]
"""The tokens that come out: looked-up ones are often, and not always, drawn."""
OF_MODEL: Mapping[str, Mapping[str, Any]] = {
    "model": {"method": "draft_model"},
    "parallel": {"method": "draft_model", "parallel_drafting": True},
    "head": {"method": "eagle3"},
}
DRAFT = Shape(1024, 3072, 12, 16, 8, 128, 151936)
"""Makes drafts for Qwen3-8B: 0.19 billion weights in its layers, and 0.16 in its projection to the vocabulary."""
PARALLEL_KEYS = {"pard_token": 3}
HEAD_KEYS = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
TINY_KEYS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}
"""What the configuration of a head has besides that of the model it drafts for, whose tables it shares."""
PERIOD = 16
"""Tokens after which a prompt repeats itself."""


NO_RUNS: Mapping[str, Run] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """One round of requests. temperature: 0 is greedy."""

    num_seqs: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.num_seqs} {'sampled' if self.temperature else 'greedy'}"

    def run(self, engine: Engine, *, tiny: bool, seed: int, predicted: Sequence[list[int]] = ()) -> Run:
        """All sequences at once. predicted: the output of each, for an oracle."""
        period, times, num_tokens = (3, 3, 8) if tiny else (PERIOD, 24, 160)
        prompts = [ids * times for ids in random_prompts([period] * self.num_seqs, engine.vocab_size, seed)]
        params = [
            SamplingParams(
                temperature=self.temperature,
                seed=number,
                max_tokens=num_tokens,
                ignore_eos=True,
                detokenize=False,
                allowed_token_ids=ALLOWED,
            )
            for number in range(self.num_seqs)
        ]
        return engine.complete(prompts, params, predicted=predicted)


def cases(*, tiny: bool) -> list[Case]:
    return [Case(num_seqs, heat) for num_seqs in ((2,) if tiny else (1, 8, 32)) for heat in (0.0, 1.0)]


def run_all(
    shape: Shape, options: dict[str, Any], *, tiny: bool, recorded: Mapping[str, Run] = NO_RUNS
) -> tuple[dict[str, Run], float]:
    """The runs of all cases on an engine that is made for them, and the seconds until it was ready. recorded: of the
    engine without drafts."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        engine = Engine(shape, options, Path(directory) / "model")
        engine.capture_graphs()
        seconds = time.perf_counter() - began
        found = {}
        for case in cases(tiny=tiny):
            if not tiny:  # compiles what only this case launches
                case.run(engine, tiny=tiny, seed=2)
            predicted = recorded[case.name].token_ids if recorded else ()
            found[case.name] = case.run(engine, tiny=tiny, seed=3, predicted=predicted)
        engine.close()
    return found, seconds


def compared(plain: Run, drafting: Run) -> Record:
    """The times of a run with drafts and of one without, and in how many sequences their tokens differ."""
    return {
        "differing": sum(mine != other for mine, other in zip(drafting.token_ids, plain.token_ids, strict=True)),
        "num_seqs": len(plain.token_ids),
        "num_drafts": drafting.num_drafts,
        "num_accepted": drafting.num_accepted,
        "num_steps": len(drafting.steps),
        "plain_num_steps": len(plain.steps),
        "plain_step_seconds": step_seconds(plain),
        "step_seconds": step_seconds(drafting),
        "plain_token_seconds": plain.span / plain.num_tokens,
        "token_seconds": drafting.span / drafting.num_tokens,
        "launching": median(step.launching for step in drafting.steps),
        "waiting": median(step.waiting for step in drafting.steps),
    }


def step_seconds(run: Run) -> float:
    """Median time from one result to the next while all sequences get tokens."""
    most = max(step.num_sampled for step in run.steps)
    return median(
        after.finished - before.finished
        for before, after in pairwise(run.steps)
        if before.num_sampled == after.num_sampled == most
    )


def measured(
    shape: Shape, options: dict[str, Any], speculations: Mapping[str, Mapping[str, Any]], *, tiny: bool
) -> Iterator[Record]:
    """A record of each case of each method. Raises RuntimeError where tokens differ, or no draft at all was accepted,
    or rejected."""
    plain, seconds = run_all(shape, options, tiny=tiny)
    yield {"what": "ready", "drafts": 0, "seconds": seconds}
    for method, speculation in speculations.items():
        gc.collect()
        torch.cuda.empty_cache()
        given = options | {"speculative_config": speculation}
        drafting, seconds = run_all(shape, given, tiny=tiny, recorded=plain if "oracle" in speculation else NO_RUNS)
        yield {"what": "ready", "method": method, "drafts": speculation["num_speculative_tokens"], "seconds": seconds}
        found = [
            {"what": "drafts", "method": method, "case": name, **compared(plain[name], run)}
            for name, run in drafting.items()
        ]
        yield from found
        if wrong := [record["case"] for record in found if record["differing"]]:
            raise RuntimeError(f"{method}: other tokens than without drafts: {', '.join(wrong)}")
        num_drafts, num_accepted = (sum(record[key] for record in found) for key in ("num_drafts", "num_accepted"))
        if not 0 < num_accepted < num_drafts:
            raise RuntimeError(f"{method}: {num_accepted} of {num_drafts} drafts were accepted: that tries one alone")


def write_drafter(method: str, directory: Path, *, tiny: bool) -> Path:
    """Directory of the model, or head, that makes drafts by `method`."""
    shape = TINY if tiny else QWEN3_8B if method == "head" else DRAFT
    added = {"head": HEAD_KEYS | (TINY_KEYS if tiny else {}), "parallel": PARALLEL_KEYS}.get(method, {})
    (shape.write(directory) / "config.json").write_text(json.dumps(shape.config() | added))
    return directory


def speculation(method: str, directory: Path, *, tiny: bool) -> Mapping[str, Any]:
    """`speculative_config` of a method. directory: for the model that makes drafts."""
    if method == "ngram":
        return SPECULATION
    drafter = write_drafter(method, directory / method, tiny=tiny)
    return {**OF_MODEL[method], "num_speculative_tokens": 4, "oracle": 0.7, "model": str(drafter)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", default="ngram", help=f"of ngram, {', '.join(OF_MODEL)}, with commas between")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    if unknown := sorted({*methods} - {"ngram", *OF_MODEL}):
        parser.error(f"no method {', '.join(unknown)}")
    emit, tiny = records.writer(arguments.out), arguments.tiny
    options = {**WHERE[tiny], "max_num_seqs": 4 if tiny else 32}
    if not tiny:
        # Room for both engines, though the first one's memory may come back late.
        options |= {"batch_invariant": True, "max_model_len": 4096, "num_blocks_override": 2048}
    with tempfile.TemporaryDirectory() as directory:
        speculations = {method: speculation(method, Path(directory), tiny=tiny) for method in methods}
        try:
            for record in measured(TINY if tiny else QWEN3_8B, options, speculations, tiny=tiny):
                emit({"part": "drafts", **record})
        except Exception as error:
            emit({"part": "drafts", "what": "drafts", "error": f"{type(error).__name__}: {str(error)[:500]}"})
            raise


if __name__ == "__main__":
    main()
