"""Sampling: from logits to tokens, as a step does it, beside what torch's operators take for the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import Subject
from benchmarks.gpu.timing import Call
from quire.sampling.batch import SampleBatch
from quire.sampling.parameters import SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling.triton_kernels import TritonKernels
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling

HISTORY = 2048
"""Tokens of each sequence, half of them its prompt."""
STEEP, WIDE = 4.0, 1.0
"""Standard deviations of logits: a nucleus of hundreds of tokens, as models have it, and of most of the vocabulary."""
NUCLEUS = 0.9
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=1.0, top_p=NUCLEUS)
RANKED = SamplingParams(temperature=1.0, top_k=50, top_p=NUCLEUS)
LOGPROBS = SamplingParams(temperature=0.0, logprobs=20)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1)


class SamplingSubjects:
    """Over the vocabulary of a shape. scale: divides numbers of sequences, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self.shape = shape
        self.device = device
        self._scale = scale

    def all(self) -> Iterator[Subject]:
        """A pass is one reading of the logits; what log-probabilities and penalties add is counted with the greedy
        choice that goes with them."""
        for name, params, passes, sigma, other in (
            ("greedy sampling", GREEDY, 1, STEEP, self.torch_greedy),
            ("random sampling", RANDOM, 1, STEEP, self.torch_random),
            ("top-p sampling", FILTERED, 2, STEEP, self.torch_top_p),
            ("top-k and top-p sampling", RANKED, 2, STEEP, None),
            ("top-p sampling, wide nucleus", FILTERED, 2, WIDE, None),
            ("log-probabilities", LOGPROBS, 2, STEEP, None),
        ):
            for count in (256, 1):
                rows = max(1, count // self._scale)
                variants = {"triton": partial(self.sampled, rows, params, sigma)}
                if other is not None:
                    variants["torch"] = partial(other, rows)
                yield Subject(name, f"{count} rows", self.work(rows, passes), variants)
        rows = max(1, 256 // self._scale)
        # Scores in float32 are written, changed where there is history (a sector each way), and read.
        work = self.work(rows, 1) + Work(rows * (8 * self.shape.vocab + 68 * HISTORY))
        yield Subject("penalties", "256 rows", work, {"triton": partial(self.sampled, rows, PENALISED, STEEP)})

    def work(self, rows: int, passes: int) -> Work:
        return Work(passes * rows * self.shape.vocab * self.shape.itemsize)

    def logits(self, rows: int, sigma: float) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.shape.dtype)
        return (torch.randn(rows, self.shape.vocab, device=self.device) * sigma).to(dtype)

    def sampled(self, rows: int, params: SamplingParams, sigma: float) -> Call:
        """The engine's sampler."""
        parameters = SamplingRows(rows)
        for row in range(rows):
            parameters.set(row, SequenceSampling(params, 977 * row, [], []))
        words = torch.from_numpy(np.stack([parameters.words(row) for row in range(rows)])).to(self.device)
        shape = (rows, HISTORY + 1)
        table = torch.randint(0, self.shape.vocab, shape, dtype=torch.int32, device=self.device)
        column = torch.arange(rows, dtype=torch.int32, device=self.device)
        lengths = torch.full_like(column, HISTORY)
        batch = SampleBatch(np.arange(rows), column, lengths, lengths // 2, table)
        sampler, logits = Sampler(parameters, TritonKernels(parameters, words, _pageable)), self.logits(rows, sigma)
        return lambda: sampler.sample(logits, batch).tensors()[0][:, 0]

    def torch_greedy(self, rows: int) -> Call:
        logits = self.logits(rows, STEEP)
        return lambda: logits.argmax(dim=-1)

    def torch_random(self, rows: int) -> Call:
        """Gumbel's trick over float32 logits."""
        logits = self.logits(rows, STEEP)
        return lambda: (
            logits.float() / 0.8 - torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        ).argmax(dim=-1)

    def torch_top_p(self, rows: int) -> Call:
        """The whole vocabulary sorted."""
        logits = self.logits(rows, STEEP)

        def choose() -> torch.Tensor:
            weights, tokens = torch.softmax(logits.float(), dim=-1).sort(dim=-1, descending=True)
            kept = torch.where(weights.cumsum(dim=-1) - weights < NUCLEUS, weights, 0)
            places = (kept / torch.empty_like(kept).exponential_()).argmax(dim=-1, keepdim=True)
            return tokens.gather(1, places)

        return choose


def _pageable(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)
