"""Tiles of production: a row has the same bits however its sequence is cut up, and at every one of many launches."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from quire.kernels.arguments import LayerAttention
from quire.kernels.triton import attention_tiles
from quire.kernels.triton.activation import activation
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.norm import norm
from quire.kernels.triton.rotary import rotation_angles
from quire.kernels.triton.sampling_shapes import SamplingShapes
from quire.sampling.results import SampledTokens
from quire.sampling_params import SamplingParams
from tests.architecture.source import ROOT
from tests.gpu.attention_rows import Sequence
from tests.kernels.triton.helpers import random
from tests.sampling.device_helpers import SMALL, sample_on
from tests.sampling.helpers import Case

pytestmark = pytest.mark.gpu
ON_CARD = torch.cuda.is_available()
LAYER = LayerAttention(0, 32, 8, 128, 128**-0.5) if ON_CARD else LayerAttention(0, 4, 2, 16, 0.25)
DTYPE = torch.bfloat16 if ON_CARD else torch.float32
NUM_LAUNCHES = 50 if ON_CARD else 2


@pytest.fixture
def several_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter short sequences have more than one split as well."""
    if not ON_CARD:
        monkeypatch.setattr(attention_tiles, "FIXED_KEYS", 32)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 3000, 9000] if ON_CARD else [31, 32, 33, 70])
def test_rows_do_not_depend_on_how_a_sequence_is_cut_up(
    length: int, device: torch.device, several_splits: None
) -> None:
    """A whole prompt, chunks of three sizes, and the split kernel for the last tokens."""
    sequence = Sequence(LAYER, length, DTYPE, device)
    whole = sequence.attend(0, length)
    assert whole.isfinite().all()
    for size in (512, 1000, 64) if ON_CARD else (20,):
        assert torch.equal(sequence.in_chunks(size), whole), f"chunks of {size}"
    for token in range(length - 3, length):
        assert torch.equal(sequence.attend(token, token + 1)[0], whole[token]), f"token {token} alone"


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (24576, 4096), (4096, 12288)] if ON_CARD else [(70, 50)])
def test_products_do_not_depend_on_the_number_of_rows(n: int, k: int, device: torch.device) -> None:
    counts = (1, 63, 64, 65, 256, 4096) if ON_CARD else (1, 15, 16, 17, 70)
    x, weight = random(device, counts[-1], k, dtype=DTYPE), random(device, n, k, dtype=DTYPE, seed=1)
    expected = matmul(x, weight)
    for count in counts[:-1]:
        assert torch.equal(matmul(x[:count], weight), expected[:count]), f"{count} rows"
        assert torch.equal(matmul(x[-count:], weight), expected[-count:]), f"the last {count} rows"


def kernels(device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of every kind of kernel that a step has, with inputs of their own that stay as they are."""
    hidden, rows, vocab = (4096, 256, 151936) if ON_CARD else (48, 3, 60)
    x, weight = random(device, rows, hidden, dtype=DTYPE), random(device, hidden, dtype=DTYPE)
    square, table = random(device, hidden, hidden, dtype=DTYPE), random(device, 500, hidden, dtype=DTYPE)
    ids = torch.arange(rows, device=device) % 500
    logits = random(torch.device("cpu"), 8 if ON_CARD else 2, vocab, dtype=torch.float32) * 3
    cases = [Case(SamplingParams(temperature=0.9, top_p=0.9, top_k=50 * (seed % 2)), seed=seed) for seed in range(8)]
    shapes = SamplingShapes() if ON_CARD else SMALL
    pages = PageTable.of_pages([random(device, 64, 2, 16, 2, 16, dtype=DTYPE) for _ in range(2)])
    blocks = torch.arange(0, 64, 2, dtype=torch.int32, device=device)

    def copied() -> torch.Tensor:
        copy_pages(pages, pages, torch.stack((blocks, blocks + 1), dim=1))
        return torch.stack(pages.memory)

    positions, frequencies = torch.arange(rows, device=device) * 37, random(device, 64)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "norm": lambda: norm(x, weight, None, 1e-6, centred=False),
        "activation": lambda: activation(x, "silu", gated=True),
        "embedding": lambda: embedding(table, ids),
        "batch-invariant product": lambda: matmul(x, square),
        "block copies": copied,
        "angles": lambda: torch.cat(rotation_angles(positions, frequencies, 1.0)),
        "sampling": lambda: torch.tensor(sample_on(device, logits, cases[: len(logits)], shapes=shapes).token_ids),
        "edited scores": lambda: logprobs_of(sample_on(device, logits, edited_cases(len(logits)), shapes=shapes)),
    }
    length = 3000 if ON_CARD else 40
    for name, invariant in (("fast", False), ("batch-invariant", True)):
        sequence = Sequence(LAYER, length, DTYPE, device, invariant=invariant)
        sequence.attend(0, length)
        calls[f"{name} prompt"] = lambda of=sequence: of.attend(0, length)  # type: ignore[misc]
        calls[f"{name} decode"] = lambda of=sequence: of.attend(length - 1, length)  # type: ignore[misc]
    return calls


def edited_cases(count: int) -> list[Case]:
    """Rows that every kernel of penalties, rules and log-probabilities has work for."""
    params = SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 1.5, 7: -2.0},
        min_tokens=9,
        logprobs=5,
        seed=3,
    )
    prompt, output = [1, 2, 3, 3, 8], [4, 5, 5]
    return [Case(params, prompt=prompt, output=output, seed=n, stop=[6], bad=[[5, 9]]) for n in range(count)]


def logprobs_of(sampled: SampledTokens) -> torch.Tensor:
    entries = [sampled.logprobs[row] for row in range(len(sampled.token_ids))]
    return torch.tensor([[*entry.logprobs, *entry.token_ids, entry.rank] for entry in entries], dtype=torch.float64)


def test_many_launches_have_the_same_bits(device: torch.device) -> None:
    """A race between asynchronous copies and products shows as a few bits, now and then."""
    differing = {}
    for name, call in kernels(device).items():
        first = call().clone()
        count = torch.zeros((), dtype=torch.int64, device=first.device)
        for _ in range(NUM_LAUNCHES):
            count += (call() != first).any()
        differing[name] = int(count)
    assert {name: count for name, count in differing.items() if count} == {}


def test_launches_stay_inside_their_memory() -> None:
    """Under compute-sanitizer where it is installed; the launches themselves run everywhere."""
    checker = shutil.which("compute-sanitizer") if ON_CARD else None
    command = [sys.executable, "-m", "tests.gpu.attention_rows"]
    if checker is not None:
        command = [checker, "--tool", "memcheck", "--error-exitcode", "9", *command]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    assert "launched" in run.stdout
