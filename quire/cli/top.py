"""`quire top`: the live view of a server in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire import envs
from quire.cli.parser import Parser
from quire.errors import QuireError
from quire.utils.failures import explain

if TYPE_CHECKING:
    from quire.dashboard.client import FrameClient
    from quire.dashboard.frame import Frame

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_RATE, MIN_RATE, MAX_RATE = 4.0, 0.1, 10.0
SAMPLE_SECONDS = 1.0


def build_parser() -> Parser:
    parser = Parser(
        prog="quire top",
        usage="quire top [URL] [options]",
        description="The KV blocks, requests and rates of a running server, live. Ctrl-C leaves.",
    )
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--api-key", metavar="KEY", help="default: QUIRE_API_KEY")
    parser.add_argument(
        "--rate", metavar="X", type=_rate, default=DEFAULT_RATE, help=f"most frames a second ({DEFAULT_RATE:g})"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and leave")
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    from quire.dashboard.client import FrameClient

    client = FrameClient(namespace.url, namespace.api_key or envs.api_key())
    try:
        if namespace.once:
            show_once(client, namespace.url)
        else:
            follow(client, namespace.url, namespace.rate)
    finally:
        client.close()
    return 0


def show_once(client: FrameClient, url: str) -> None:
    """Print one frame; its means are those since the server's start."""
    from rich.console import Console

    from quire.dashboard.history import History
    from quire.dashboard.terminal import render

    history = History()
    frame = client.frame()
    history.add_frame(frame, time.monotonic())
    Console().print(render(frame, history, url))


def follow(client: FrameClient, url: str, rate: float) -> None:
    """Redraw for every frame, and once a second, until the server ends the stream or the user interrupts."""
    from rich.console import Console
    from rich.live import Live

    from quire.dashboard.history import History
    from quire.dashboard.terminal import render

    news: queue.SimpleQueue[Frame | QuireError] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(client, rate, news), name="quire-top-reader", daemon=True).start()
    frame = _take(news.get())
    history, next_sample = History(), time.monotonic()
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            if now >= next_sample:  # also while the server rests and sends nothing: then the rates fall to zero
                history.add_frame(frame, now)
                next_sample = now + SAMPLE_SECONDS
            live.update(render(frame, history, url), refresh=True)
            with contextlib.suppress(queue.Empty):
                frame = _take(news.get(timeout=max(0.0, next_sample - time.monotonic())))


def _read(client: FrameClient, rate: float, news: queue.SimpleQueue[Frame | QuireError]) -> None:
    try:
        for frame in client.frames(rate):
            news.put(frame)
    except QuireError as error:
        news.put(error)
    except BaseException as error:  # else the screen would wait for ever for a frame
        news.put(QuireError(f"the stream of frames cannot be read: {explain(error)}"))


def _take(item: Frame | QuireError) -> Frame:
    if isinstance(item, QuireError):
        raise item
    return item


def _rate(text: str) -> float:
    rate = float(text)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise argparse.ArgumentTypeError(f"must be from {MIN_RATE:g} to {MAX_RATE:g}, not {text}")
    return rate


_rate.__name__ = "number"
