"""Start and end of a server, with one API process or several."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, UserError
from quire.server.settings import ServerSettings
from quire.utils.text_files import read_text_file

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM

OBITUARY_SECONDS = 1.0
"""Seconds of 503 at /health between the engine's death and the exit."""
SHUTDOWN_GRACE_SECONDS = 2
"""Seconds for complete answers to reach slow clients at the end."""


def heed_hangups(settings: ServerSettings) -> None:
    """Ignore SIGHUP if the server renews certificates itself (`enable_ssl_refresh`) and has no terminal."""
    if settings.enable_ssl_refresh and not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def ending_signals() -> tuple[signal.Signals, ...]:
    """Signals that end a server. SIGHUP (closed terminal) is left out if ignored at the start (nohup)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def read_prefixes(settings: ServerSettings) -> dict[str, str]:
    """Texts to register at the start, by path. Raises ConfigError for an unreadable file."""
    return {path: read_text_file(path, param="preload_prefix") for path in settings.preload_prefix}


async def preload(engine: AsyncLLM, prefixes: Mapping[str, str]) -> None:
    """Register the texts. Raises ConfigError if one cannot be."""
    for path, text in prefixes.items():
        try:
            await engine.register_prefix(text)
        except UserError as error:
            raise ConfigError(f"preload_prefix: {path}: {error.message}", param="preload_prefix") from None


async def first(*works: Coroutine[Any, Any, int | bool | None]) -> int | None:
    """Run `works` side by side until one is done; cancel the others and return its result."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
