"""The launches whose hardware counters are read: python -m benchmarks.gpu.counted [--tiny]

Each kernel runs once before, so that nothing is compiled where counters are read; the profiler starts after that. See
benchmarks/gpu/counters.py.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.gpu.attention_subjects import DECODES, PROMPTS, AttentionSubjects
from benchmarks.gpu.sampling_subjects import RANDOM, STEEP, SamplingSubjects
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import BLOCK_SIZE, Subjects
from benchmarks.gpu.timing import Call

TINY_SCALE = 512


def calls(device: torch.device, *, tiny: bool) -> dict[str, Call]:
    """By name: attention of a large and a small decode and of a prompt, a norm, skinny products, sampling."""
    shape, scale = (TINY, TINY_SCALE) if tiny else (QWEN3_8B, 1)
    attention = AttentionSubjects(shape, device, scale)
    batches = {"decode": DECODES[0], "decode of one": DECODES[-1], "prompt": PROMPTS[0]}
    found = {name: attention.paged(attention.scaled(batch), BLOCK_SIZE) for name, batch in batches.items()}
    products = {s.case: s for s in Subjects(shape, device, scale).products() if s.kernel == "product gate_up"}
    norms = {subject.case: subject for subject in Subjects(shape, device, scale).norms()}
    for rows in ("1 tokens", "8192 tokens"):
        found[f"library product, {rows}"] = products[rows].variants["library"]()
    found["batch-invariant product, 1 tokens"] = products["1 tokens"].variants["invariant"]()
    found["norm"] = norms["8192 tokens"].variants["triton"]()
    found["sampling"] = SamplingSubjects(shape, device, scale).sampled(max(1, 256 // scale), RANDOM, STEEP)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    with torch.inference_mode():
        found = calls(device, tiny=arguments.tiny)
        for call in found.values():
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for call in found.values():
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
