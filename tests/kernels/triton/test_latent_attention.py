"""The Triton kernels of latent attention against float64, interpreted; whole and in parts, the same bits."""

from __future__ import annotations

import pytest
import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import LatentShape
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton import latent_attention
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.latent_attention import LatentKernels, LatentScratch, latent_tiles

pytestmark = pytest.mark.usefixtures("default_device")

BLOCK_SIZE = 8
SMALL, LARGE = LatentShape(0, 3, 24, 6, 0.3), LatentShape(0, 70, 40, 16, 0.2)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Sequences:
    """Random inputs of some sequences, whose latents lie in one pool. angles: of every position."""

    def __init__(
        self,
        shape: LatentShape,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        *,
        fixed: bool = False,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            """Random numbers, the same on each device."""
            return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())

        widths = (shape.num_heads * shape.rank, shape.num_heads * shape.rope_dim, shape.rank, shape.rope_dim)
        self.shape = shape
        self.inputs = [tuple(drawn(n, w).to(dtype) for w in widths) for n in lengths]
        blocks = -(-max(lengths) // BLOCK_SIZE)
        order = torch.randperm(len(lengths) * blocks, generator=generator, device="cpu")
        self.tables = (1 + order.to(torch.get_default_device())).view(len(lengths), blocks).int()
        self.pages = torch.full((1 + len(lengths) * blocks, BLOCK_SIZE, shape.width), 7, dtype=page_dtype or dtype)
        self.angles = torch.arange(max(lengths))[:, None] * 3.0 ** -torch.arange(shape.rope_dim // 2)
        limits = DeviceLimits(num_multiprocessors=16)
        scratch = LatentScratch.allocate(
            shape.num_heads, shape.width, 4, max(lengths), torch.get_default_device(), limits
        )
        tiles = latent_tiles(shape, dtype.itemsize, limits, batch_invariant=fixed)
        self.kernels = LatentKernels(shape, self.pages, tiles, scratch, limits)

    def step(self, work: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """(sequence, its first and last token of the step) -> results of each."""
        counts = torch.tensor([end - start for _, start, end in work])
        lengths = torch.tensor([end for _, _, end in work])
        positions = torch.cat([torch.arange(start, end) for _, start, end in work])
        rows = torch.tensor([sequence for sequence, _, _ in work])
        tables = self.tables[rows.repeat_interleave(counts), positions // BLOCK_SIZE].long()
        batch = DeviceBatch(
            num_seqs=len(work),
            num_tokens=len(positions),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            rows=rows.int(),
            query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
            seq_lens=lengths.int(),
            slot_positions=positions,
            slot_mapping=(tables * BLOCK_SIZE + positions % BLOCK_SIZE,),
            block_tables=(self.tables,),
        )
        inputs = tuple(torch.cat([self.inputs[s][i][a:b] for s, a, b in work]).clone() for i in range(4))
        angles = self.angles[positions]
        rotation = DeviceRotation(angles.cos(), angles.sin())
        out = torch.full_like(inputs[0], 9.0)
        self.kernels.launch(inputs, rotation, out, batch, 0)
        return list(out.split(counts.tolist()))

    def exact(self, sequence: int) -> torch.Tensor:
        """Over what the pages hold, if they are of 8 bits."""
        shape = self.shape
        query, turned_query, latent, key = (each.double() for each in self.inputs[sequence])
        angles = self.angles[: len(query), None].double()

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        kept = torch.cat((latent, turned(key[:, None])[:, 0]), dim=1)
        if self.pages.dtype == torch.uint8:
            stored = self.pages[self.tables[sequence].long()].flatten(0, 1)[: len(kept)]
            stored = stored.view(torch.float8_e4m3fn).double()
            torch.testing.assert_close(stored, kept, rtol=2**-4 + 1e-6, atol=2**-10 + 1e-6)
            kept = stored
        turned_query = turned(turned_query.unflatten(1, (shape.num_heads, -1)))
        queries = torch.cat((query.unflatten(1, (shape.num_heads, -1)), turned_query), dim=2)
        scores = torch.einsum("thd,ld->htl", queries, kept) * shape.scale
        weights = scores.masked_fill(torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf).softmax(-1)
        return torch.einsum("htl,ld->thd", weights, kept[:, : shape.rank]).flatten(1)


@pytest.mark.parametrize(("shape", "lengths"), [(SMALL, [19, 4]), (LARGE, [5])])
def test_prompts_and_single_tokens(shape: LatentShape, lengths: list[int]) -> None:
    sequences = Sequences(shape, lengths)
    first = [(index, 0, length - 1) for index, length in enumerate(lengths)]
    last = [(index, length - 1, length) for index, length in enumerate(lengths)]
    for index, parts in enumerate(zip(sequences.step(first), sequences.step(last), strict=True)):
        torch.testing.assert_close(torch.cat(parts).double(), sequences.exact(index), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_of_8_bits(dtype: torch.dtype) -> None:
    sequences = Sequences(SMALL, [19, 4], dtype, page_dtype=torch.uint8)
    sequences.step([(0, 0, 18), (1, 0, 3)])
    for index, last in enumerate(sequences.step([(0, 18, 19), (1, 3, 4)])):
        tolerance = 2e-5 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(last.double(), sequences.exact(index)[-1:], rtol=0, atol=tolerance)


def test_bfloat16_pages_and_queries() -> None:
    sequences = Sequences(SMALL, [13], torch.bfloat16)
    (result,) = sequences.step([(0, 0, 13)])
    torch.testing.assert_close(result.double(), sequences.exact(0), rtol=0, atol=0.06)


def test_parts_of_a_long_sequence_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token by itself, whose keys several programs share, and the same token in a chunk, which one program has."""
    monkeypatch.setattr(latent_attention, "SPLIT_KEYS", 32)
    alone, together = Sequences(SMALL, [75, 6], fixed=True), Sequences(SMALL, [75, 6], fixed=True)
    alone.step([(0, 0, 74), (1, 0, 5)])
    together.step([(0, 0, 73)])
    (last, other) = alone.step([(0, 74, 75), (1, 5, 6)])
    chunk, prompt = together.step([(0, 73, 75), (1, 0, 6)])
    assert torch.equal(chunk[1:], last)
    assert torch.equal(prompt[5:], other)
    torch.testing.assert_close(last.double(), alone.exact(0)[74:], rtol=0, atol=2e-5)
