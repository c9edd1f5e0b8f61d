"""Live view in a terminal: converts a frame to rich text, two blocks per character."""

from __future__ import annotations

import colorsys
from collections.abc import Callable

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
"""Maximum adapter names shown for running and for waiting requests."""
MAP_ROWS = 24
"""Maximum lines of the map; a larger pool's cells show several blocks."""
SMALL_HEIGHT, NARROW_WIDTH = 34, 90
"""Lines below which requests precede the map, columns below which less is told of each."""
FRAME_ROWS = 8
"""Lines of a small screen besides requests and map."""
MIN_MAP_ROWS = 2

ORDERS: dict[str, Callable[[RequestView], float]] = {
    "age": lambda request: -request.seconds,
    "rate": lambda request: -request.tokens_per_second,
    "tokens": lambda request: -_num_generated(request),
    "blocks": lambda request: -len(blocks_of(request)),
}
"""Orders of the requests besides `queue`: running ones by arrival, then the engine's queue."""
QUEUE_ORDER = "queue"


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
    """Blocks of a frame by state: used, shared, cached and free blocks."""
    states = kv.states[1:]
    free, cached = states.count(FREE_STATE), states.count(CACHED_STATE)
    used = len(states) - free - cached
    return {"used": used, "shared": used - states.count(1), "cached": cached, "free": free}


def render(
    frame: Frame,
    history: History,
    url: str,
    *,
    order: str = QUEUE_ORDER,
    size: tuple[int, int | None] = (NARROW_WIDTH, None),
) -> RenderableType:
    """Screen of `quire top` for a frame. order: QUEUE_ORDER or one of ORDERS. size: columns and lines (None: any)."""
    counts = counts_of(frame.kv)
    title = Text.assemble(("Quire ", "bold"), (frame.model, "bold cyan"), f"  {url}  ", (frame.backend, "dim"))
    if frame.is_draining:
        title.append("  shutting down", "bold red")
    width, height = size[0], size[1] or SMALL_HEIGHT
    is_small = height < SMALL_HEIGHT
    num_requests = min(REQUESTS_SHOWN, max(1, (height - FRAME_ROWS) // 2)) if is_small else REQUESTS_SHOWN
    map_rows = max(0, height - FRAME_ROWS - min(num_requests, len(frame.kv.requests))) if is_small else MAP_ROWS
    block_map = BlockMap(frame.kv, max(MIN_MAP_ROWS, min(MAP_ROWS, map_rows)))
    caption = "  ".join(f"{count:,} {name}" for name, count in counts.items())
    panel = Panel(block_map, title=f"{caption} [dim]of {len(frame.kv.states) - 1:,} blocks[/]", title_align="left")
    rates = _rates(frame, history, counts["used"], has_lines=not is_small)
    requests = _requests(frame, order, num_requests, is_narrow=width < NARROW_WIDTH)
    rest = [*_adapters(frame.stats), *_images(frame.stats)]
    if is_small:
        title.no_wrap, title.overflow = True, "ellipsis"
        return Group(
            title, rates, requests, _ended(frame.recent), *rest, *([panel] if map_rows >= MIN_MAP_ROWS else [])
        )
    return Group(title, rates, panel, *rest, requests, _ended(frame.recent))


def _rates(frame: Frame, history: History, num_used: int, *, has_lines: bool) -> Table:
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
    if has_lines and history.num_samples > 1:
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


def _requests(frame: Frame, order: str, num_shown: int, *, is_narrow: bool) -> RenderableType:
    if not frame.kv.requests:
        return Text("no requests", "dim")
    counts = {status: sum(r.status == status for r in frame.kv.requests) for status in STATUSES}
    shows_images = frame.stats.max_encoder_tokens > 0
    columns = [*COLUMNS[:1], *((IMAGES,) if shows_images else ()), *COLUMNS[1:]]
    if is_narrow:
        columns = [column for column in columns if column[0] in NARROW_COLUMNS]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("request", "state"):
        table.add_column(name, no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    requests = frame.kv.requests
    if order != QUEUE_ORDER:
        requests = sorted(requests, key=ORDERS[order])
    for request in requests[:num_shown]:
        table.add_row(_name(request, is_narrow=is_narrow), request.status, *(tell(request) for _, tell in columns))
    by = "" if order == QUEUE_ORDER else f"  by {order}"
    told = [f"{count} {status}" for status, count in counts.items() if count or not is_narrow]
    parts: list[RenderableType] = [Text("  ".join(told) + by), table]
    left = len(requests) - num_shown
    if left > 0:
        parts.append(Text(f"and {left:,} more", "dim"))
    return Group(*parts)


def _name(request: RequestView, *, is_narrow: bool) -> Text:
    name, _, number = request.request_id.rpartition("#")
    chip = ("██ ", Style(color=colour_of(request.request_id)))
    return Text.assemble(chip, (f"#{number} ", "bold"), ("" if is_narrow else name[:16], "dim"))


def _num_generated(request: RequestView) -> int:
    return sum(sequence.num_output_tokens for sequence in request.sequences)


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


Column = tuple[str, Callable[[RequestView], str]]
COLUMNS: tuple[Column, ...] = (
    ("prompt", lambda request: f"{request.num_prompt_tokens:,}"),
    ("cached", lambda request: f"{request.num_cached_tokens:,}"),
    ("generated", lambda request: f"{_num_generated(request):,}"),
    ("tokens/s", lambda request: f"{request.tokens_per_second:,.1f}"),
    ("age", lambda request: _age(request.seconds)),
    ("sequences", lambda request: str(len(request.sequences))),
    ("blocks", lambda request: f"{len(blocks_of(request)):,}"),
)
IMAGES: Column = ("images", lambda request: f"{request.num_image_tokens:,}")
NARROW_COLUMNS = ("prompt", "generated", "tokens/s", "age")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
