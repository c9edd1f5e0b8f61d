"""A short list of kernels: python -m benchmarks.gpu.kernels --out FILE [--tiny]

The card's limits, then attention beside FlashAttention 3 and products in three formats against them. --tiny runs a tiny
shape wherever this is, to try the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.attention_subjects import AttentionSubjects
from benchmarks.gpu.limits import Ceilings, measure_ceilings
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import Products, Subject
from benchmarks.gpu.timing import CACHE_BYTES, measure

TINY_SCALE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit, tiny = records.writer(arguments.out), arguments.tiny
    device = torch.device("cpu" if tiny else "cuda")
    shape, scale = (TINY, TINY_SCALE) if tiny else (QWEN3_8B, 1)
    with torch.inference_mode():
        ceilings, timings = measure_ceilings(device, **({"num_bytes": 1 << 16, "size": 64} if tiny else {}))
        spread = {name: timing.spread for name, timing in timings.items()}
        base = {"part": "kernels", "what": "limits", "bandwidth": ceilings.bandwidth, "peak": ceilings.peak}
        emit({**base, "spread": spread})
        for subjects in (AttentionSubjects(shape, device, scale), Products(shape, device, scale)):
            for subject in subjects.all():
                for record in measured(subject, ceilings, device, cache_bytes=1 if tiny else CACHE_BYTES):
                    emit(record)


def measured(subject: Subject, ceilings: Ceilings, device: torch.device, *, cache_bytes: int) -> Iterator[Record]:
    """One record for each variant. What fails is a record too, and the others are measured all the same."""
    for variant in subject.variants:
        base = {"part": "kernels", "what": "kernel", "kernel": subject.kernel, "case": subject.case, "variant": variant}
        try:
            timing = measure(subject.calls(variant, cache_bytes), device)
        except Exception as error:
            yield {**base, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        share = ceilings.share(subject.work, timing.median)
        yield {
            **base,
            "seconds": timing.median,
            "spread": timing.spread,
            "bound": ceilings.bound(subject.work),
            "share": share,
        }


if __name__ == "__main__":
    main()
