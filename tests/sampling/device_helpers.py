"""Sampling the cases of `tests.sampling.helpers` on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.triton.sampling_shapes import SamplingShapes
from quire.sampling.device.batch import DeviceSampleBatch
from quire.sampling.device.parameters import DeviceSamplingRows
from quire.sampling.device.sampler import DeviceSampler
from quire.sampling.sampler import SampledTokens
from tests.sampling.helpers import Case

SMALL = SamplingShapes(segment=64, lanes=32, tile=64, listed=32, ranked=24, num_warps=4)
"""Several segments, tiles and lists that overflow, in vocabularies of hundreds."""
LANES = 64
NEVER = 10**6
"""What the token table holds behind a row's tokens: no kernel may take it for a token."""
OFFSET, STRIDE = 7, DeviceSamplingRows.WIDTH + 4
"""Where the parameters lie in the arena, and words from row to row."""


class Arena:
    """Words on the device, written at once."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.words = torch.full((OFFSET + num_rows * STRIDE,), -1, dtype=torch.int32, device=device)
        view = self.words[OFFSET:].view(num_rows, STRIDE)[:, : DeviceSamplingRows.WIDTH]
        self.rows = DeviceSamplingRows(num_rows, view, OFFSET)

    def write(self, offset: int, values: np.ndarray) -> None:
        assert values.dtype == np.int32
        self.words[offset : offset + len(values)] = torch.from_numpy(values).to(self.words.device)


@dataclass
class Prepared:
    """Cases in rows, ready to be sampled."""

    arena: Arena
    sampler: DeviceSampler
    batch: DeviceSampleBatch
    lengths: np.ndarray


def prepare(
    cases: Sequence[Case],
    device: torch.device,
    *,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    shapes: SamplingShapes = SMALL,
) -> Prepared:
    where = np.arange(len(cases)) if rows is None else np.array(rows, np.int64)
    arena = Arena(num_rows or int(where.max()) + 1, device)
    histories = [case.prompt + case.output for case in cases]
    lengths = np.array([len(history) for history in histories])
    tokens = np.full((arena.rows.words.shape[0], int(lengths.max()) + 3), NEVER, np.int32)
    for row, case, history in zip(where.tolist(), cases, histories, strict=True):
        arena.rows.set(row, case.sampling, arena)
        tokens[row, : len(history)] = history

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    batch = DeviceSampleBatch(
        rows_host=where,
        rows=column(where),
        lengths=column(lengths),
        num_prompt_tokens=column(np.array([len(case.prompt) for case in cases])),
        token_table=torch.from_numpy(tokens).to(device),
    )
    return Prepared(arena, DeviceSampler(arena.rows, shapes, LANES), batch, lengths)


def sample_on(
    device: torch.device,
    logits: torch.Tensor,
    cases: Sequence[Case],
    *,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    shapes: SamplingShapes = SMALL,
) -> SampledTokens:
    """As `helpers.sample`; also checks that the token table has the tokens, and nothing else changed in it."""
    made = prepare(cases, device, rows=rows, num_rows=num_rows, shapes=shapes)
    before = made.batch.token_table.cpu().clone()
    samples = made.sampler.sample(logits.clone().to(device), made.batch)
    sampled = samples.assemble([tensor.cpu() for tensor in samples.tensors()])
    before[made.batch.rows_host, made.lengths] = torch.from_numpy(sampled.token_ids.astype(np.int32))
    assert torch.equal(before, made.batch.token_table.cpu())
    return sampled
