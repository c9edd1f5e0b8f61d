"""Tiles, stages and splits of attention: python -m benchmarks.gpu.attention_sweep --out FILE [--tiny]

The kernels alone, without norms, rotation and the write, the most decisive variants first. `difference` is the norm of
the difference from attention in float32 over the same pages, over the result's, of the last tokens of two sequences;
`nan` counts elements of all rows. --tiny: small shapes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.attention_subjects import BLOCK_SIZE, Batch, device_batch, device_limits, scattered_tables
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.timing import CACHE_BYTES, Call, measure, num_copies
from quire.kernels.arguments import LayerAttention
from quire.kernels.triton.attention_tiles import (
    DeviceLimits,
    HeadShape,
    SplitPlan,
    Tiles,
    num_splits,
    scratch_rows,
    split_plan,
    varlen_tiles,
)
from quire.kernels.triton.decode_attention import SplitAttention, SplitScratch
from quire.kernels.triton.paged_attention import PagedAttention, VarlenAttention
from quire.kernels.triton.prompt_attention import WarpGroupAttention, allows_warp_groups
from quire.kernels.triton.runtime import INTERPRETED

PROMPT_TILES = {
    "three warp groups": Tiles(128, 128, 4, 2, uses_warp_groups=True),
    "64 keys, 8 warps, two residents": Tiles(128, 64, 8, 2, max_registers=128),
    "128 keys, 8 warps": Tiles(128, 128, 8, 3),
}
FLOAT8_PROMPT_TILES = {"64 keys, 4 warps, two residents": Tiles(128, 64, 4, 2)}
PROMPTS = (
    Batch(8, 1024, 1024),
    Batch(1, 8192, 8192),
    Batch(1, 2048, 16384),
    Batch(3, 1001, 1777),
    Batch(16, 300, 300),
    Batch(1, 32768, 32768),
)
FLOAT8_TILES = ((Tiles(16, 128, 4, 3), 2), (Tiles(16, 64, 2, 3), 4))
"""Beside the number of residents that registers and memory allow."""
TILES = ((Tiles(16, 64, 4, 2), 3),)
FLOAT8 = torch.uint8 if INTERPRETED else torch.float8_e4m3fn
TINY_TILES = Tiles(16, 16, 4, 1)
REFERENCE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's attention over a batch. copies: the same over other memory, together beyond the cache."""

    batch: Batch
    layer: LayerAttention
    copies: tuple[PagedAttention, ...]

    @classmethod
    def build(
        cls, shape: Shape, batch: Batch, page_dtype: torch.dtype | None, device: torch.device, *, is_dry: bool = False
    ) -> Case:
        """page_dtype: of keys and values (the shape's). is_dry: to compile, not to run: one copy, pages for nothing."""
        dtype: torch.dtype = getattr(torch, shape.dtype)
        page_dtype = page_dtype or dtype
        layer = LayerAttention(0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, device)
        described = device_batch(batch, tables, BLOCK_SIZE, device)
        page_bytes = num_blocks * BLOCK_SIZE * 2 * shape.num_kv_heads * shape.head_dim * page_dtype.itemsize
        count = 1 if is_dry or INTERPRETED else min(8, num_copies(page_bytes, CACHE_BYTES))
        new = torch.empty if is_dry else torch.randn
        works = []
        for _ in range(count):
            sizes = (2 if is_dry else num_blocks), 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim
            pages = new(sizes, device=device, dtype=dtype).to(page_dtype if page_dtype.is_floating_point else dtype)
            if not page_dtype.is_floating_point:
                pages = pages.to(torch.float8_e4m3fn).view(page_dtype)
            query = new(described.num_tokens, shape.qkv_width, device=device, dtype=dtype)
            out = torch.empty(described.num_tokens, shape.num_heads * shape.head_dim, device=device, dtype=dtype)
            works.append(PagedAttention(query, pages, out, described, 0, layer))
        return cls(batch, layer, tuple(works))

    def expected(self) -> dict[int, torch.Tensor]:
        """The last rows of the first and of the last sequence, in float32: by their first row, [rows, out's width]."""
        work, layer, batch = self.copies[0], self.layer, self.batch
        rows, found = min(REFERENCE_ROWS, batch.num_new), {}
        for sequence in {0, batch.num_seqs - 1}:
            pages = work.pages
            is_float8 = pages.dtype.itemsize == 1
            pages = (pages.view(torch.uint8) if is_float8 else pages)[work.tables[sequence].long()]
            pages = pages.view(torch.float8_e4m3fn) if is_float8 else pages
            key, value = (pages[:, part].float().flatten(0, 1)[: batch.length] for part in range(2))
            first = (sequence + 1) * batch.num_new - rows
            query = work.query[first : first + rows, : layer.num_heads * layer.head_dim].float()
            query = query.view(rows, layer.num_kv_heads, -1, layer.head_dim)
            scores = torch.einsum("rkgd,lkd->rkgl", query, key) * layer.stored_scale
            seen = torch.arange(batch.length, device=query.device) <= torch.arange(
                batch.length - rows, batch.length, device=query.device
            ).unsqueeze(1)
            scores.masked_fill_(~seen[:, None, None], float("-inf"))
            found[first] = torch.einsum("rkgl,lkd->rkgd", scores.softmax(-1), value).reshape(rows, -1)
        return found

    def head_shape(self) -> HeadShape:
        return HeadShape(
            self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim, self.copies[0].query.dtype.itemsize
        )

    def prompt(self, tiles: Tiles) -> list[Call]:
        return [partial(self._kernel(work.pages, tiles).launch, work, 0) for work in self.copies]

    def _kernel(self, pages: torch.Tensor, tiles: Tiles) -> VarlenAttention | WarpGroupAttention:
        if tiles.uses_warp_groups:
            return WarpGroupAttention(self.layer, pages, tiles)
        return VarlenAttention(self.layer, pages, None, tiles)

    def decode(self, plan: SplitPlan) -> list[Call]:
        scratch = SplitScratch.allocate(
            scratch_rows(plan, self.head_shape(), self.batch.num_seqs),
            self.layer.head_dim,
            self.copies[0].query.device,
        )
        return [
            partial(SplitAttention(self.layer, work.pages, None, plan.tiles, plan.tokens, scratch).launch, work, plan)
            for work in self.copies
        ]


Variants = Mapping[str, Callable[[Case], list[Call]]]


def prompt_variants(limits: DeviceLimits, choices: Mapping[str, Tiles]) -> Variants:
    """The present tiles first."""

    def present(case: Case) -> list[Call]:
        can = allows_warp_groups(case.layer, case.copies[0].pages, case.copies[0].query.dtype)
        lengths = case.batch.num_new, case.batch.length
        return case.prompt(varlen_tiles(case.head_shape(), *lengths, limits, allow_warp_groups=can))

    tiles = choices if not INTERPRETED else {"small": TINY_TILES}
    return {"present": present, **{name: partial(_prompt, tiles=each) for name, each in tiles.items()}}


def decode_variants(limits: DeviceLimits, choices: tuple[tuple[Tiles, int], ...], splits: tuple[int, ...]) -> Variants:
    """The present plan first; then its tiles with other splits, then other tiles, with the splits for their number of
    residents."""

    def planned(case: Case) -> SplitPlan:
        return split_plan(case.head_shape(), case.batch.num_seqs, case.batch.length, limits)

    def split(case: Case, count: int) -> list[Call]:
        plan = planned(case)
        return case.decode(SplitPlan(plan.tiles, plan.tokens, count, count, 2 * plan.tiles.block_n))

    def tiled(case: Case, tiles: Tiles, residents: int) -> list[Call]:
        programs = case.batch.num_seqs * case.layer.num_kv_heads
        count = num_splits(programs, case.batch.length, tiles.block_n, residents * limits.num_multiprocessors)
        return case.decode(SplitPlan(tiles, planned(case).tokens, count, count, 2 * tiles.block_n))

    found: dict[str, Callable[[Case], list[Call]]] = {"present": lambda case: case.decode(planned(case))}
    found |= {f"{count} splits": partial(split, count=count) for count in splits}
    for tiles, residents in choices if not INTERPRETED else ((TINY_TILES, 2),):
        name = f"{tiles.block_n} keys, {tiles.num_warps} warps, {tiles.num_stages} stages, {residents} residents"
        found[name] = partial(tiled, tiles=tiles, residents=residents)
    return found


def _prompt(case: Case, tiles: Tiles) -> list[Call]:
    return case.prompt(tiles)


def cases(shape: Shape, device: torch.device, *, is_dry: bool = False) -> Iterator[tuple[str, Case, Variants]]:
    """Name, case and variants, the most decisive first."""
    limits = device_limits(device)
    decodes = (
        (Batch(256, 1, 1024), FLOAT8, FLOAT8_TILES, ()),
        (Batch(1, 1, 8192), None, TILES, (32, 16)),
        (Batch(32, 1, 8192), FLOAT8, FLOAT8_TILES, ()),
        (Batch(256, 1, 1024), None, TILES, ()),
    )
    for index in range(max(len(PROMPTS), len(decodes))):
        for batch in PROMPTS[index : index + 1]:
            batch = _tiny(batch) if INTERPRETED else batch
            case = Case.build(shape, batch, None, device, is_dry=is_dry)
            yield f"prompt, {batch.name}", case, prompt_variants(limits, PROMPT_TILES)
        for batch, page_dtype, choices, splits in decodes[index : index + 1]:
            batch = _tiny(batch) if INTERPRETED else batch
            case = Case.build(shape, batch, page_dtype, device, is_dry=is_dry)
            name = "decode" if page_dtype is None else "decode, float8 pages"
            yield f"{name}, {batch.name}", case, decode_variants(limits, choices, splits)
    batch = _tiny(PROMPTS[1]) if INTERPRETED else PROMPTS[1]
    case = Case.build(shape, batch, FLOAT8, device, is_dry=is_dry)
    yield f"prompt, float8 pages, {batch.name}", case, prompt_variants(limits, FLOAT8_PROMPT_TILES)


def _tiny(batch: Batch) -> Batch:
    return Batch(min(2, batch.num_seqs), min(9, batch.num_new), min(70, batch.length))


def measured(name: str, case: Case, variants: Variants, device: torch.device) -> Iterator[Record]:
    """One record for each variant. What fails is a record too, and the others are measured all the same."""
    expected = case.expected()
    out = case.copies[0].out
    for variant, build in variants.items():
        base = {"part": "attention sweep", "what": "attention variant", "case": name, "variant": variant}
        try:
            calls = build(case)
            out.fill_(float("nan"))
            calls[0]()
            found = torch.cat([out[first : first + len(rows)].float() for first, rows in expected.items()])
            right = torch.cat(list(expected.values()))
            checked = {
                "difference": ((found - right).norm() / right.norm()).item(),
                "nan": int(out.isnan().sum()),
            }
            timing = measure(calls, device)
        except Exception as error:
            yield {**base, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        yield {**base, **checked, "seconds": timing.median, "spread": timing.spread}


def dry_calls() -> Iterator[Call]:
    """Each variant's first launch over memory of the host that is not there, to compile it ahead."""
    for _, case, variants in cases(QWEN3_8B, torch.device("cpu"), is_dry=True):
        for build in variants.values():
            yield build(case)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit = records.writer(arguments.out)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    with torch.inference_mode():
        for name, case, variants in cases(TINY if arguments.tiny else QWEN3_8B, device):
            for record in measured(name, case, variants, device):
                emit(record)


if __name__ == "__main__":
    main()
