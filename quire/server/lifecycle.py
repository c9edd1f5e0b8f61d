"""What a server of one process and one of several have in common, from the start to the end."""

from __future__ import annotations

import asyncio
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
"""How long /health says 503 after the engine died, before the process exits."""
SHUTDOWN_GRACE_SECONDS = 2
"""What answers that are complete get to reach slow clients at the end."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a server. SIGHUP, which comes when a terminal closes, is none where it was ignored at the
    start (nohup)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def read_prefixes(settings: ServerSettings) -> dict[str, str]:
    """The texts to be registered at the start, by path. Raises ConfigError for a file that is none."""
    return {path: read_text_file(path, param="preload_prefix") for path in settings.preload_prefix}


async def preload(engine: AsyncLLM, prefixes: Mapping[str, str]) -> None:
    """Register the texts (by the files they come from). Raises ConfigError for one that cannot be."""
    for path, text in prefixes.items():
        try:
            await engine.register_prefix(text)
        except UserError as error:
            raise ConfigError(f"preload_prefix: {path}: {error.message}", param="preload_prefix") from None


async def first(*works: Coroutine[Any, Any, int | bool | None]) -> int | None:
    """Run `works` side by side until one is done, and cancel the others. Returns its result."""
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
