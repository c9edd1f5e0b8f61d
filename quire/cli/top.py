"""`quire top`: live view of a server in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from quire.cli.connection_flags import add_connection_flags, connect
from quire.cli.parser import Parser
from quire.errors import QuireError
from quire.utils.failures import explain

if TYPE_CHECKING:
    from quire.dashboard.client import FrameClient
    from quire.dashboard.frame import Frame

News: TypeAlias = "queue.SimpleQueue[Frame | QuireError | str | None]"
"""Frames, an error that ends the view, a pressed key, or None: the user leaves."""
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_RATE, MIN_RATE, MAX_RATE = 4.0, 0.1, 10.0
SAMPLE_SECONDS = 1.0
PIPE_WIDTH = 110
QUEUE_ORDER, ORDER_KEY = "queue", "s"
ORDER_NAMES = (QUEUE_ORDER, "age", "rate", "tokens", "blocks")


def build_parser() -> Parser:
    parser = Parser(
        prog="quire top",
        usage="quire top [URL] [options]",
        description="The KV blocks, requests and rates of a running server, live. q and Ctrl-C leave, s changes the "
        "order of the requests; a pipe gets a frame behind the other.",
    )
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    add_connection_flags(parser)
    parser.add_argument(
        "--rate", metavar="X", type=_rate, default=DEFAULT_RATE, help=f"most frames a second ({DEFAULT_RATE:g})"
    )
    parser.add_argument(
        "--sort",
        metavar="BY",
        choices=ORDER_NAMES,
        default=ORDER_NAMES[0],
        help=f"order of the requests: {', '.join(ORDER_NAMES)} (default: {ORDER_NAMES[0]})",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and leave")
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    from quire.dashboard.client import SECONDS_WITHOUT_A_BYTE, FrameClient

    connection = connect(namespace, timeout=SECONDS_WITHOUT_A_BYTE)
    client = FrameClient(connection)
    try:
        if namespace.once:
            show_once(client, namespace.url, namespace.sort)
        else:
            follow(client, namespace.url, namespace.rate, namespace.sort)
    finally:
        connection.close()
    return 0


def show_once(client: FrameClient, url: str, order: str) -> None:
    """Print one frame, with means since the server's start."""
    from rich.console import Console

    from quire.dashboard.history import History
    from quire.dashboard.terminal import render

    history = History()
    frame = client.frame()
    history.add_frame(frame, time.monotonic())
    console = Console(width=_width())
    console.print(render(frame, history, url, order=order, size=(console.width, None)))


def follow(client: FrameClient, url: str, rate: float, order: str = QUEUE_ORDER) -> None:
    """Redraw for every frame, at least once a second, until the stream ends or the user leaves. Without a terminal,
    print one frame per second."""
    from rich.console import Console
    from rich.live import Live

    from quire.dashboard.history import History
    from quire.dashboard.terminal import render

    news: News = queue.SimpleQueue()
    threading.Thread(target=_read, args=(client, rate, news), name="quire-top-reader", daemon=True).start()
    frame = _take(news.get())
    history, next_sample, console = History(), time.monotonic(), Console(width=_width())
    is_screen = console.is_terminal
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if is_screen else None
        if is_screen:
            stack.enter_context(_keys(news))
        while frame is not None:
            now = time.monotonic()
            is_due = now >= next_sample
            if is_due:  # also while an idle server sends nothing: the rates fall to zero
                history.add_frame(frame, now)
                next_sample = now + SAMPLE_SECONDS
            if live is not None:
                live.update(render(frame, history, url, order=order, size=console.size), refresh=True)
            elif is_due:
                console.print(render(frame, history, url, order=order, size=(console.width, None)))
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=max(0.0, next_sample - time.monotonic()))
                if item == ORDER_KEY:
                    order = ORDER_NAMES[(ORDER_NAMES.index(order) + 1) % len(ORDER_NAMES)]
                else:
                    frame = _take(item)


def _width() -> int | None:
    return None if sys.stdout.isatty() else shutil.get_terminal_size((PIPE_WIDTH, 0)).columns


@contextlib.contextmanager
def _keys(news: News) -> Iterator[None]:
    """Put None into `news` when the user types q, ORDER_KEY for s; keys are read singly, without echo."""
    source = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    if source is None:
        yield
        return

    def read() -> None:
        while key := os.read(source, 1):
            if key in (b"q", b"Q"):
                news.put(None)
            elif key in (b"s", b"S"):
                news.put(ORDER_KEY)

    before = termios.tcgetattr(source)
    tty.setcbreak(source)
    threading.Thread(target=read, name="quire-top-keys", daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def _read(client: FrameClient, rate: float, news: News) -> None:
    try:
        for frame in client.frames(rate):
            news.put(frame)
    except QuireError as error:
        news.put(error)
    except BaseException as error:  # otherwise the screen would wait forever
        news.put(QuireError(f"the stream of frames cannot be read: {explain(error)}"))


def _take(item: Frame | QuireError | str | None) -> Frame | None:
    if isinstance(item, QuireError):
        raise item
    assert not isinstance(item, str)
    return item


def _rate(text: str) -> float:
    rate = float(text)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise argparse.ArgumentTypeError(f"must be from {MIN_RATE:g} to {MAX_RATE:g}, not {text}")
    return rate


_rate.__name__ = "number"
