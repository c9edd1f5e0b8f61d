"""The kernel tables: python -m benchmarks.gpu.kernels --out FILE [--seconds S] [--tiny]

Measures the card's limits, then every kernel against them. --tiny runs a tiny shape wherever this is, to try the
script.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.attention_subjects import AttentionSubjects
from benchmarks.gpu.family_subjects import FamilySubjects
from benchmarks.gpu.limits import Ceilings, measure_ceilings
from benchmarks.gpu.quantized_subjects import QuantizedSubjects
from benchmarks.gpu.records import Record
from benchmarks.gpu.sampling_subjects import SamplingSubjects
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.subjects import Subject, Subjects
from benchmarks.gpu.timing import CACHE_BYTES, measure

TINY_SCALE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin nothing after this long")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    emit = records.writer(arguments.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert arguments.tiny or device.type == "cuda", "no CUDA device"
    with torch.inference_mode():
        ceilings = emit_ceilings(device, arguments.tiny, emit)
        shape, scale = (TINY, TINY_SCALE) if arguments.tiny else (QWEN3_8B, 1)
        for subject in in_order(shape, device, scale):
            if time.monotonic() - started > arguments.seconds:
                emit({"part": "kernels", "what": "skipped", "kernel": subject.kernel, "case": subject.case})
                continue
            for record in measured(subject, ceilings, device, cache_bytes=1 if arguments.tiny else CACHE_BYTES):
                emit(record)


def in_order(shape: Shape, device: torch.device, scale: int) -> Iterator[Subject]:
    """Attention, products, experts, what some families compute, sampling, and what is bound by memory: what decides
    designs comes first."""
    subjects = Subjects(shape, device, scale)
    yield from AttentionSubjects(shape, device, scale).all()
    yield from subjects.products()
    yield from QuantizedSubjects(shape, device, scale).all()
    yield from FamilySubjects(shape, device, scale).all()
    yield from SamplingSubjects(shape, device, scale).all()
    yield from subjects.others()


def emit_ceilings(device: torch.device, tiny: bool, emit: records.Emit) -> Ceilings:
    sizes = {"num_bytes": 1 << 16, "size": 64} if tiny else {}
    ceilings, timings = measure_ceilings(device, **sizes)
    emit(
        {
            "part": "kernels",
            "what": "limits",
            "bandwidth": ceilings.bandwidth,
            "peak": ceilings.peak,
            "spread": {name: timing.spread for name, timing in timings.items()},
        }
    )
    return ceilings


def measured(subject: Subject, ceilings: Ceilings, device: torch.device, *, cache_bytes: int) -> Iterator[Record]:
    """One record for each variant. What fails is a record too, and the others are measured all the same."""
    for variant in subject.variants:
        base = {"part": "kernels", "what": "kernel", "kernel": subject.kernel, "case": subject.case, "variant": variant}
        try:
            timing = measure(subject.calls(variant, cache_bytes), device)
        except Exception as error:
            yield {**base, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        yield {
            **base,
            "seconds": timing.median,
            "spread": timing.spread,
            "bytes": subject.work.bytes,
            "operations": subject.work.operations,
            "bound": ceilings.bound(subject.work),
            "share": ceilings.share(subject.work, timing.median),
        }


def kernel_names(subjects: Iterable[Subject]) -> list[str]:
    return list(dict.fromkeys(subject.kernel for subject in subjects))


if __name__ == "__main__":
    main()
