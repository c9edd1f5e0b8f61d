"""Texts and conversations beside the event loop: what waits, what is ended, and who goes to a helper."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from quire.config.adapters import NO_ADAPTERS
from quire.config.media import TEXT_DEFAULTS
from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.front_end import FrontEnd
from quire.engine.texts import MAX_LONG_TEXTS, SHORT_CONVERSATION_BYTES
from quire.errors import EngineDeadError, QuireError
from quire.tokenization.conversation import conversation_of
from quire.tokenization.helpers import in_turn
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.fair_threads import FairThreads
from tests.processes import has_pid_ended
from tests.tokenization.build import byte_level_backend

OPTIONS = EngineOptions.from_keywords({})
LONG = "def f(x):\n    return 'naïve 你好'  # \t\n" * 8000
HELLO = conversation_of([{"role": "user", "content": "hello"}])


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


@pytest.fixture
async def engine(weightless_model: Path) -> AsyncIterator[AsyncLLM]:
    options = EngineOptions.from_keywords({"model": str(weightless_model), "tokenizer": "bundled"})
    engine = AsyncLLM.from_options(options, in_process=True, executor="tests.fakes.factories:plain")
    yield engine
    engine.shutdown()


async def until_working(engine: AsyncLLM) -> None:
    assert engine.texts.helpers is not None
    while not any(not each.is_usable for each in tuple(engine.texts.helpers._working)):
        await asyncio.sleep(0.001)


def block(threads: FairThreads, release: threading.Event, number: int) -> list[asyncio.Task[bool]]:
    """Fill the threads with work."""
    return [asyncio.create_task(in_turn(threads, 1, lambda: release.wait(60))) for _ in range(number)]


async def test_a_request_that_is_cancelled_ends_the_process_that_tokenises_for_it(engine: AsyncLLM) -> None:
    helpers = engine.texts.helpers
    assert helpers is not None
    assert len(await engine.texts.encode(LONG[:100_000])) > 1000
    assert not helpers.pids  # short enough for this process
    engine.input_processor.max_model_len = len(LONG)
    working = asyncio.create_task(engine.texts.encode(LONG))
    await until_working(engine)
    (pid,) = helpers.pids
    os.kill(pid, signal.SIGSTOP)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await asyncio.to_thread(has_pid_ended, pid)
    ids = await engine.texts.encode(LONG)
    assert ids == engine.tokenizer.encode_batch([LONG])[0]  # type: ignore[union-attr]
    (pid,) = helpers.pids
    engine.shutdown()
    assert has_pid_ended(pid)
    with pytest.raises(EngineDeadError):
        helpers.encode(LONG, True)


async def test_a_long_conversation_is_one_job(engine: AsyncLLM) -> None:
    tokenizer, helpers = engine.tokenizer, engine.texts.helpers
    assert tokenizer is not None
    assert helpers is not None
    engine.input_processor.max_model_len = len(LONG)
    short = await engine.texts.render(HELLO)
    assert short.token_ids == tokenizer.encode(short.text, add_special_tokens=False)
    [pid] = helpers.pids
    for add_special_tokens in (True, False):
        messages = [{"role": "user", "content": LONG}]
        found = await engine.texts.render(conversation_of(messages, add_special_tokens=add_special_tokens))
        assert LONG.strip() in found.text
        assert found.token_ids == tokenizer.encode_batch([found.text], add_special_tokens)[0]
    assert helpers.pids == [pid]


async def test_a_short_conversation_does_not_wait_for_long_work(engine: AsyncLLM) -> None:
    release = threading.Event()
    blocking = block(engine.texts._text_threads, release, 2 * MAX_LONG_TEXTS)
    long = conversation_of([{"role": "user", "content": "x" * SHORT_CONVERSATION_BYTES}])
    waiting = asyncio.create_task(engine.texts.render(long))
    try:
        assert "hello" in (await engine.texts.render(HELLO)).text
        assert not any(task.done() for task in (*blocking, waiting))
    finally:
        release.set()
    await asyncio.gather(*blocking)
    assert "xx" in (await waiting).text


async def test_a_conversation_does_not_wait_for_ever(engine: AsyncLLM) -> None:
    clock, release = Clock(), threading.Event()
    engine.texts._clock = clock
    blocking = block(engine.texts._chat_thread, release, 1)
    waiting = asyncio.create_task(engine.texts.render(HELLO))
    await asyncio.sleep(0)
    clock.seconds = 131.0
    release.set()
    with pytest.raises(QuireError, match="this one has waited 31 seconds"):
        await waiting
    await asyncio.gather(*blocking)
    assert "hello" in (await engine.texts.render(HELLO)).text


@pytest.mark.parametrize("has_loop", [True, False])
@pytest.mark.parametrize(("pattern", "longest"), [(None, 2**18), ("(?<=b)a|a(?=a*c)", 256)])
def test_texts_for_patterns_that_are_not_known_go_to_helpers_sooner(
    pattern: str | None, longest: int, has_loop: bool
) -> None:
    """There they have a limit of time, which offline engines need as well; these tokenise other texts themselves."""
    backend = byte_level_backend()
    if pattern is not None:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer = Tokenizer(backend)
    others = {"adapters": NO_ADAPTERS, "logits_processors": ()}
    config: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=4096), media=TEXT_DEFAULTS, **others)
    client: Any = None
    front_end = FrontEnd(config, client, tokenizer, OPTIONS)
    if has_loop:
        front_end.encode_long_texts_elsewhere()
    sent: list[str] = []
    if tokenizer.encode_elsewhere is not None:
        tokenizer.encode_elsewhere = lambda text, _: sent.append(text) or []  # type: ignore[func-returns-value]
    tokenizer.encode("a" * longest)
    tokenizer.encode("b" * (longest + 1))
    assert [len(text) for text in sent] == ([longest + 1] if has_loop or pattern else [])
