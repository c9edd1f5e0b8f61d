"""Steps of families whose layers are of other kinds than Qwen3-8B's.

    python -m benchmarks.gpu.families --out FILE [--names A,B] [--warm] [--tiny]

Experts, latent attention, attention over chosen keys, and layers with states, in shapes of published models (fewer
layers where memory asks) with random weights. An engine each: ready, decode steps of 1, 32 and 256 sequences, a prompt
of 8,192 tokens, time of a step by kernel. --warm: compile the kernels with few layers, measure nothing. --tiny: small
models in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import records
from benchmarks.gpu.engine import GRAPH_SIZES, WHERE, Engine, Tasks, started
from benchmarks.gpu.family_shapes import FAMILIES, ITEMSIZE, Family, tiny
from benchmarks.gpu.limits import Ceilings, Work, measure_ceilings
from benchmarks.gpu.records import Record
from benchmarks.gpu.step_log import Step
from benchmarks.gpu.workloads import Workload
from quire.config.families import read_shape
from quire.config.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """The least that steps of a model cost: weights are read once a step, of experts as many as random routes touch,
    keys once, states read and written; activations are left out, and so is attention's arithmetic: a prompt's limit is
    that of its products."""

    shape: ModelShape

    def touched(self, num_tokens: int) -> float:
        """Expected number of a layer's routed experts that `num_tokens` tokens choose."""
        experts = self.shape.experts
        if experts is None:
            return 0.0
        return experts.num_experts * (1 - (1 - experts.num_active / experts.num_experts) ** num_tokens)

    def work(self, step: Step) -> Work:
        shape = self.shape
        head = shape.embedding_parameters
        routed = shape.num_moe_layers * shape.expert_parameters * self.touched(step.num_tokens)
        context = step.kv_tokens // step.num_seqs
        kept = sum(count * each.read_elements(context) for each, count in shape.attention_counts.items() if context)
        return Work(
            bytes=ITEMSIZE * (shape.dense_parameters + routed + head * bool(step.num_sampled))
            + step.num_seqs * (ITEMSIZE * kept + 2 * shape.matrix_bytes()),
            operations=2.0 * ((shape.active_parameters() - head) * step.num_tokens + head * step.num_sampled),
        )


def cost_of(family: Family) -> ShapeCost:
    return ShapeCost(read_shape(family.config()))


PROFILED = 1, 32
"""Sequences of the steps whose time is told by kernel."""


def measured(family: Family, options: dict[str, Any], ceilings: Ceilings, device: torch.device) -> Iterator[Record]:
    """Records of one family's engine, which is gone behind them."""
    base = {"part": "families", "family": family.name, "layers": f"{family.num_layers} of {family.published_layers}"}
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        engine = Engine(family, options, Path(directory) / "model", cost_of(family))
        try:
            yield {**base, **started(engine, began)}
            tasks = Tasks(engine, ceilings, device)
            sizes = (1, 2) if device.type == "cpu" else PROFILED
            for record in chain(tasks.steps(), tasks.prompts(longest=8192), tasks.kernels(sizes)):
                yield {**base, **record}
        finally:
            engine.close()


def warm(family: Family, options: dict[str, Any]) -> None:
    """Launch every kernel that a measurement launches."""
    with tempfile.TemporaryDirectory() as directory:
        few = family.with_layers(family.warm_layers)
        engine = Engine(few, {**options, "num_blocks_override": 2048}, Path(directory) / "model", cost_of(few))
        engine.capture_graphs()
        for work in (Workload(1, 128, 4), Workload(32, 128, 4), Workload(4, 3000, 4)):
            engine.run(work, seed=1)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit, device, failed = records.writer(arguments.out), torch.device("cpu" if arguments.tiny else "cuda"), []
    options = WHERE[arguments.tiny]
    if not arguments.tiny:
        options |= {"cuda_graphs": "full_and_piecewise", "cuda_graph_sizes": GRAPH_SIZES}
    if not arguments.warm:
        ceilings, _ = measure_ceilings(device, **({"num_bytes": 1 << 16, "size": 64} if arguments.tiny else {}))
        emit({"part": "families", "what": "limits", "bandwidth": ceilings.bandwidth, "peak": ceilings.peak})
        torch.cuda.empty_cache()
    for name in arguments.names.split(","):
        family = tiny(FAMILIES[name]) if arguments.tiny else FAMILIES[name]
        try:
            if arguments.warm:
                warm(family, options | {"gpu_memory_utilization": 0.5})
                continue
            for record in measured(family, options, ceilings, device):
                emit(record)
        except Exception as error:
            failed.append(name)
            words = f"{type(error).__name__}: {str(error)[:500]}"
            emit({"part": "families", "family": name, "what": "error", "error": words})
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
