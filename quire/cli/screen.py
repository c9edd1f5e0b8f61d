from __future__ import annotations

import re
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.markdown import Markdown

    from quire.cli.answers import ReplyPiece

SECONDS_BETWEEN_FRAMES = 0.08

_KEPT = frozenset("\n\t")
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT},
    0x7F: "\u2421",
    **{code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), 0x2028, 0x2029, *_DIRECTIONS)},
}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def visible(text: str) -> str:
    """Replace characters that move the cursor, colour, ring or reorder by visible signs."""
    return text.translate(_VISIBLE)


def split_blocks(text: str) -> int:
    """Characters of the leading blocks of a growing Markdown text that later text cannot change."""
    done = place = 0
    fence = ""
    is_blank = False
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line[found.end() :].strip():
                fence = ""
        elif line.strip():
            if is_blank and not line[0].isspace():
                done = place
            if found:
                fence = found[1]
        is_blank = not line.strip()
        place += len(line)
    return done


class Screen(Protocol):
    """Output of one answer, entered before its first piece. The context ends its last line."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, piece: ReplyPiece) -> None: ...


class PlainScreen:
    """Plain answer for pipes and files, without reasoning."""

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print(flush=True)

    def write(self, piece: ReplyPiece) -> None:
        print(piece.content, end="", flush=True)


class MarkdownScreen:
    """Answer as Markdown: whole blocks are printed once, the last is redrawn as it grows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._tail = ""
        self._is_thinking = False
        self._drawn = 0.0

    def __enter__(self) -> MarkdownScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_content()
        if self._is_thinking:
            self._console.print("\n")

    def write(self, piece: ReplyPiece) -> None:
        if piece.thoughts:
            self._end_content()
            self._is_thinking = True
            thoughts = visible(piece.thoughts)
            self._console.print(thoughts, style="dim", end="", markup=False, highlight=False, emoji=False)
        if piece.content:
            if self._is_thinking:
                self._console.print("\n")
                self._is_thinking = False
            self._grow(visible(piece.content))

    def _grow(self, text: str) -> None:
        from rich.live import Live

        self._tail += text
        length = split_blocks(self._tail)
        if length:
            self._print(self._tail[:length])
            self._tail = self._tail[length:]
        now = time.monotonic()
        if not length and now - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        self._drawn = now
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_End(self._tail), refresh=True)

    def _end_content(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._tail.strip():
            self._print(self._tail)
        self._tail = ""

    def _print(self, text: str) -> None:
        self._console.print(_markdown(text))
        self._console.print()


class _End:
    """Last lines of a Markdown text that fit the terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for line in console.render_lines(_markdown(self._text), options, pad=False)[-(options.size.height - 1) :]:
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Markdown:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)  # addresses are written out, so that no link hides its target
