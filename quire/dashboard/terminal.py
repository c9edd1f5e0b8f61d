"""Live view in a terminal: converts a frame to rich text, two blocks per character."""

from __future__ import annotations

import colorsys

from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from quire.dashboard.frame import Frame, blocks_of, number_of, owners_of
from quire.dashboard.history import History
from quire.dashboard.recent import Recent
from quire.kv_cache.block_pool import CACHED_STATE, FREE_STATE
from quire.kv_cache.stats import EngineStats
from quire.scheduler.snapshot import KVSnapshot, RequestView

GOLDEN_ANGLE = 137.508 / 360
FREE, CACHED, UNKNOWN = Color.from_rgb(38, 41, 48), Color.from_rgb(84, 90, 102), Color.from_rgb(150, 155, 165)
SHARED_LIFT = 0.55
"""Shift of a shared block's colour towards white, 0 to 1."""
SPARKS = "▁▂▃▄▅▆▇█"
STATUSES = ("running", "preempted", "swapped", "waiting", "pinned")
REQUESTS_SHOWN = 12
ADAPTERS_SHOWN = 6
"""Maximum number of adapter names shown for running and for waiting requests."""
MAP_ROWS = 24
"""Maximum number of lines of the map; cells of a larger pool show several blocks."""


def colour_of(request_id: str, *, shared: bool = False) -> Color:
    """Colour of a request, as on the live page within the terminal's palette."""
    hue = (0.5 + (number_of(request_id) - 1) * GOLDEN_ANGLE) % 1
    parts = colorsys.hls_to_rgb(hue, 0.62, 0.6)
    lift = SHARED_LIFT if shared else 0.0
    red, green, blue = (round(255 * (part + (1 - part) * lift)) for part in parts)
    return Color.from_rgb(red, green, blue)


class BlockMap:
    """Map of all blocks, row by row; a character shows two, upper and lower half. In a larger pool a cell stands for
    several blocks and shows its busiest."""

    def __init__(self, kv: KVSnapshot, rows: int = MAP_ROWS) -> None:
        self._kv = kv
        self._rows = rows
        self._owners = {block: entries[0].request_id for block, entries in owners_of(kv).items()}

    def blocks_per_cell(self, width: int) -> int:
        return max(1, -(-(len(self._kv.states) - 1) // (2 * width * self._rows)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        step = self.blocks_per_cell(width)
        cells = [self._colour(first, step) for first in range(1, len(self._kv.states), step)]
        for start in range(0, len(cells), 2 * width):
            upper = cells[start : start + width]
            lower = cells[start + width : start + 2 * width]
            for column, colour in enumerate(upper):
                below = lower[column] if column < len(lower) else None
                yield Segment("▀", Style(color=colour, bgcolor=below))
            yield Segment.line()

    def _colour(self, first: int, count: int) -> Color:
        states = self._kv.states[first : first + count]
        used = [state for state in states if state not in (FREE_STATE, CACHED_STATE)]
        if not used:
            return CACHED if CACHED_STATE in states else FREE
        block = first + states.index(max(used))
        owner = self._owners.get(block)
        return UNKNOWN if owner is None else colour_of(owner, shared=max(used) > 1)


def counts_of(kv: KVSnapshot) -> dict[str, int]:
    """Numbers of used, shared, cached and free blocks."""
    states = kv.states[1:]
    free, cached = states.count(FREE_STATE), states.count(CACHED_STATE)
    used = len(states) - free - cached
    return {"used": used, "shared": used - states.count(1), "cached": cached, "free": free}


def render(frame: Frame, history: History, url: str) -> RenderableType:
    counts = counts_of(frame.kv)
    title = Text.assemble(("Quire ", "bold"), (frame.model, "bold cyan"), f"  {url}  ", (frame.backend, "dim"))
    if frame.is_draining:
        title.append("  shutting down", "bold red")
    block_map = BlockMap(frame.kv)
    caption = "  ".join(f"{count:,} {name}" for name, count in counts.items())
    panel = Panel(block_map, title=f"{caption} [dim]of {len(frame.kv.states) - 1:,} blocks[/]", title_align="left")
    rates, requests = _rates(frame, history, counts["used"]), _requests(frame)
    return Group(title, rates, panel, *_adapters(frame.stats), *_images(frame.stats), requests, _ended(frame.recent))


def _rates(frame: Frame, history: History, num_used: int) -> Table:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    usage = num_used / max(1, len(frame.kv.states) - 1)
    figures = [
        ("tokens/s", "-" if history.tokens_per_second is None else f"{history.tokens_per_second:,.0f}", "tokens"),
        ("first token", _milliseconds(history.time_to_first_token), "ttft"),
        ("prefix hits", "-" if history.hit_rate is None else f"{history.hit_rate:.0%}", "hits"),
        ("KV in use", f"{usage:.0%}", "usage"),
    ]
    if history.acceptance is not None:
        figures.append(("drafts accepted", f"{history.acceptance:.0%}", "drafts"))
    for _ in figures:
        table.add_column(ratio=1)
    table.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value, _ in figures))
    if history.num_samples > 1:
        table.add_row(*(Text(sparkline(history.values(key), 18), "cyan") for _, _, key in figures))
    return table


def sparkline(values: list[float | None], width: int) -> str:
    """Last `width` values in characters of eight heights; spaces for missing values."""
    shown = values[-width:]
    highest = max((value for value in shown if value is not None), default=0.0)
    return "".join(
        " " if value is None else SPARKS[min(7, int(8 * value / highest)) if highest > 0 else 0] for value in shown
    )


def _ended(recent: Recent) -> Text:
    parts = [
        f"{name} {_milliseconds(times.p50)}, 95 % {_milliseconds(times.p95)}"
        for name, times in (("first token", recent.time_to_first_token), ("last token", recent.seconds))
        if times is not None
    ]
    return Text(f"ended: {'; '.join(parts)}" if parts else "", "dim")


def _adapters(stats: EngineStats) -> list[Text]:
    if not stats.num_adapter_slots:
        return []
    line = Text(f"adapters: {stats.num_loaded_adapters} of {stats.num_adapter_slots} slots", "dim")
    for state, names in (("running", stats.running_adapters), ("waiting", stats.waiting_adapters)):
        if names:
            more = f" and {len(names) - ADAPTERS_SHOWN:,} more" if len(names) > ADAPTERS_SHOWN else ""
            line.append(f"; {state} {', '.join(names[:ADAPTERS_SHOWN])}{more}")
    return [line]


def _images(stats: EngineStats) -> list[Text]:
    if not stats.max_encoder_tokens:
        return []
    kept = f"{stats.num_encoder_tokens:,} of {stats.max_encoder_tokens:,} tokens kept"
    return [Text(f"images: {kept}; {stats.encoded_images_total:,} encoded", "dim")]


def _requests(frame: Frame) -> RenderableType:
    if not frame.kv.requests:
        return Text("no requests", "dim")
    counts = {status: sum(r.status == status for r in frame.kv.requests) for status in STATUSES}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("request", "state"):
        table.add_column(name)
    shows_images = frame.stats.max_encoder_tokens > 0
    for name in ("prompt", *(("images",) if shows_images else ()), "cached", "generated", "sequences", "blocks"):
        table.add_column(name, justify="right")
    for request in frame.kv.requests[:REQUESTS_SHOWN]:
        table.add_row(*_row(request, shows_images=shows_images))
    parts: list[RenderableType] = [Text("  ".join(f"{count} {status}" for status, count in counts.items())), table]
    left = len(frame.kv.requests) - REQUESTS_SHOWN
    if left > 0:
        parts.append(Text(f"and {left:,} more", "dim"))
    return Group(*parts)


def _row(request: RequestView, *, shows_images: bool) -> tuple[RenderableType, ...]:
    name, _, number = request.request_id.rpartition("#")
    chip = ("██ ", Style(color=colour_of(request.request_id)))
    shown = Text.assemble(chip, (f"#{number} ", "bold"), (name[:16], "dim"))
    num_blocks = len(blocks_of(request))
    num_generated = sum(sequence.num_output_tokens for sequence in request.sequences)
    prompt = [request.num_prompt_tokens, *([request.num_image_tokens] if shows_images else [])]
    numbers = (*prompt, request.num_cached_tokens, num_generated, len(request.sequences), num_blocks)
    return shown, request.status, *(f"{number:,}" for number in numbers)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
