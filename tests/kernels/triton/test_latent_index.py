"""The indexer of sparse latent attention in Triton, interpreted, and attention over its choice: against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import IndexShape, LatentShape
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton import latent_index
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.latent_attention import LatentKernels, LatentScratch, latent_tiles
from quire.kernels.triton.latent_index import select_keys
from quire.kernels.triton.runtime import recorded_launches
from tests.fakes.compilations import CompilationRecorder
from tests.layers.state_steps import randn

pytestmark = pytest.mark.usefixtures("default_device")

BLOCK_SIZE, TOP = 8, 7
LATENT = LatentShape(0, 3, 24, 6, 0.3, TOP)
INDEX = IndexShape(0, 5, 12, 6, TOP, LATENT.width, 0.25)
LENGTHS = [30, 7, 12]
"""The last two tokens of the first sequence, all of the second, the last of the third: see `step`."""
STARTS = [28, 0, 11]


class Sequences:
    """Random latents and keys of an indexer; nothing is turned but by the identity."""

    def __init__(self) -> None:
        blocks = -(-max(LENGTHS) // BLOCK_SIZE)
        order = torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(0), device="cpu")
        self.tables = (1 + order.to(torch.get_default_device())).view(3, -1).int()
        self.pages = torch.full((1 + 3 * blocks, BLOCK_SIZE, LATENT.width + INDEX.dim), 7.0)
        self.latents = [randn(length, LATENT.width, seed=length) for length in LENGTHS]
        # Five keys again and again, of halves: sums are exact, and every score comes more than once.
        halves = randn(5, INDEX.dim, seed=7).mul(2).round() / 2
        self.keys = [halves[torch.arange(length) % 5] for length in LENGTHS]
        for sequence, (latent, key) in enumerate(zip(self.latents, self.keys, strict=True)):
            for position in range(STARTS[sequence]):
                block = int(self.tables[sequence, position // BLOCK_SIZE])
                self.pages[block, position % BLOCK_SIZE] = torch.cat((latent[position], key[position]))

    def batch(self) -> DeviceBatch:
        """Two tokens of padding behind the sequences, which come in another order than their tables."""
        order = [1, 2, 0]
        positions = torch.cat([torch.arange(STARTS[s], LENGTHS[s]) for s in order])
        sequence = torch.cat([torch.full((LENGTHS[s] - STARTS[s],), s) for s in order])
        slots = self.tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.tensor([0, 7, 8, 10, 10]).int()
        lengths = torch.tensor([*(LENGTHS[s] for s in order), 0]).int()
        padded = torch.cat((slots, torch.tensor([-1, -1])))
        positions = torch.cat((positions, torch.tensor([0, 0])))
        rows = torch.tensor([*order, 0]).int()
        return DeviceBatch(4, 12, 7, 30, rows, starts, lengths, positions, (padded,), (self.tables,))

    def rows(self, each: list[torch.Tensor]) -> torch.Tensor:
        own = torch.cat([each[s][STARTS[s] :] for s in (1, 2, 0)])
        return torch.cat((own, torch.full((2, own.shape[1]), torch.nan)))


@pytest.mark.parametrize("at_once", [3, 2**24])
def test_the_best_keys_and_attention_over_them(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """at_once: scores that are kept at a time."""
    monkeypatch.setattr(latent_index, "SCRATCH_ELEMENTS", at_once)
    sequences = Sequences()
    batch = sequences.batch()
    query = randn(12, INDEX.num_heads * INDEX.dim, seed=9).mul(2).round() / 2
    weights = randn(12, INDEX.num_heads, seed=8).round()
    angles = torch.zeros(12, 3)
    rotation = DeviceRotation(angles.cos(), angles.sin())
    selected = torch.full((12, TOP), -5, dtype=torch.int32)
    inputs = query.clone(), sequences.rows(sequences.keys), weights
    select_keys(INDEX, inputs, rotation, sequences.pages, batch, 0, selected)

    tiles = latent_tiles(LATENT, 4, DeviceLimits(num_multiprocessors=4), batch_invariant=False)
    limits = DeviceLimits(num_multiprocessors=4)
    scratch = LatentScratch.allocate(LATENT.num_heads, LATENT.width, 4, 32, torch.get_default_device(), limits)
    kernels = LatentKernels(LATENT, sequences.pages, tiles, scratch, limits)
    latents = sequences.rows(sequences.latents)
    heads = randn(12, 3, LATENT.width, seed=5)
    own = heads[:, :, :24].flatten(1), heads[:, :, 24:].flatten(1).clone()
    out = torch.full((12, 3 * 24), 9.0)
    kernels.launch(
        (*own, latents[:, :24].contiguous(), latents[:, 24:].contiguous()), rotation, out, batch, 0, selected
    )

    assert (out[-2:] == 9.0).all(), "padding is not written"
    assert (selected[-2:] == -5).all()
    token = 0
    for s in (1, 2, 0):
        for position in range(STARTS[s], LENGTHS[s]):
            keys = sequences.keys[s][: position + 1].double()
            products = torch.relu(query[token].view(5, -1).double() @ keys.T)
            scores = (products * weights[token].double()[:, None]).sum(0) * INDEX.scale
            best = scores.sort(descending=True, stable=True).indices[:TOP].sort().values
            if position < TOP:
                assert (selected[token] == -5).all()
            else:
                assert selected[token].tolist() == best.tolist()
            seen = sequences.latents[s][best].double()
            chosen = (heads[token].double() @ seen.T * LATENT.scale).softmax(-1) @ seen[:, :24]
            torch.testing.assert_close(out[token].double(), chosen.flatten(), rtol=0, atol=2e-5)
            token += 1


def test_lengths_of_sequences_need_no_other_kernels() -> None:
    """Scores of any number of keys, and first tokens behind any number of others, are of one kind of memory."""
    sequences = Sequences()
    batch = sequences.batch()
    query, weights = randn(12, INDEX.num_heads * INDEX.dim, seed=9), randn(12, INDEX.num_heads, seed=8)
    inputs, selected = (query, sequences.rows(sequences.keys), weights), torch.empty(12, TOP, dtype=torch.int32)
    recorder = CompilationRecorder()
    with recorded_launches(recorder):
        for length in (16, 17, 30, 32, 4096, 5000):
            select_keys(INDEX, inputs, None, sequences.pages, replace(batch, max_seq_len=length), 0, selected)
    assert sorted(name for name, _ in recorder.needed) == ["_choose_kernel", "_prepare_kernel", "_scores_kernel"]


def test_queries_and_keys_are_turned() -> None:
    sequences = Sequences()
    batch = sequences.batch()
    query, weights = randn(12, INDEX.num_heads * INDEX.dim, seed=9), randn(12, INDEX.num_heads, seed=8)
    angles = randn(12, 3, seed=3)
    turned = query.clone()
    key = sequences.rows(sequences.keys)
    batch = replace(batch, max_seq_len=TOP)
    selected = torch.empty(12, TOP, dtype=torch.int32)
    rotation = DeviceRotation(angles.cos(), angles.sin())
    select_keys(INDEX, (turned, key, weights), rotation, sequences.pages, batch, 0, selected)

    def expected(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (each[:, None] for each in (angles.cos(), angles.sin()))
        low, high, rest = x[:, :, :3], x[:, :, 3:6], x[:, :, 6:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=2)

    torch.testing.assert_close(turned.view(12, 5, 12), expected(query.view(12, 5, 12)), rtol=0, atol=1e-6)
    (slots,) = batch.slot_mapping
    written = sequences.pages.view(-1, LATENT.width + INDEX.dim)[slots[:10].long(), LATENT.width :]
    torch.testing.assert_close(written, expected(key[:, None])[:10, 0], rtol=0, atol=1e-6)
