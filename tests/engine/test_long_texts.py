"""Long texts in processes of their own: the same ids, and nothing left behind, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.front_end import FrontEnd
from quire.engine.long_texts import ABANDONMENT, Abandonment, LongTexts, TokenizerProcess
from quire.errors import EngineDeadError, InternalError, UserError
from quire.tokenization.tokenizer import Tokenizer, open_tokenizer
from quire.utils import patience
from tests.processes import has_pid_ended
from tests.tokenization.build import byte_level, byte_level_backend

OPTIONS = EngineOptions.from_keywords({})
VOCAB_SIZE = 4096
"""Of the bundled model."""
SNIPPET = "def f(x):\n    return 'naïve 你好 \N{FACE WITH TEARS OF JOY}'  # \t <s></s>\n"
LONG = SNIPPET * 6000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = open_tokenizer(OPTIONS, VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> Iterator[LongTexts]:
    texts = LongTexts(OPTIONS, VOCAB_SIZE, tokenizer)
    yield texts
    texts.close()


@pytest.mark.parametrize("text", ["", "x", SNIPPET, LONG, "\0" * 70_000, " " * 300_000])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_ids_are_those_of_the_tokenizer_itself(
    texts: LongTexts, tokenizer: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    assert texts.encode(text, add_special_tokens) == tokenizer.encode(text, add_special_tokens)


def test_one_process_serves_texts_one_after_the_other_and_several_those_at_once(
    texts: LongTexts, tokenizer: Tokenizer
) -> None:
    texts.encode(SNIPPET, True)
    assert len(texts.pids) == 1
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(texts.encode(LONG, True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tokenizer.encode(LONG)] * 2
    assert len(texts.pids) == 2


def test_a_process_that_is_killed_fails_its_text_alone(texts: LongTexts, tokenizer: Tokenizer) -> None:
    texts.encode(SNIPPET, True)
    for pid in texts.pids:
        os.kill(pid, signal.SIGKILL)
    for _ in range(len(texts.pids)):
        with pytest.raises(InternalError, match="was killed by signal 9"):
            texts.encode(LONG, True)
    assert texts.encode(LONG, True) == tokenizer.encode(LONG)


def test_what_is_wrong_with_a_text_is_its_callers_error(tmp_path: Path) -> None:
    """The word-level tokenizer of this directory has no token for unknown words."""
    vocabulary = '{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}'
    (tmp_path / "tokenizer.json").write_text(
        f'{{"version": "1.0", "added_tokens": [], "model": {vocabulary}, "pre_tokenizer": {{"type": "Whitespace"}}}}'
    )
    options = EngineOptions.from_keywords({"tokenizer": str(tmp_path)})
    tokenizer = open_tokenizer(options, VOCAB_SIZE)
    assert tokenizer is not None
    process = TokenizerProcess(options, VOCAB_SIZE, tokenizer)
    try:
        process._is_checked = True  # the sample has unknown words too
        with pytest.raises(UserError, match=r"^the tokenizer cannot encode the text"):
            process.encode("b", True)
        assert process.encode("a a", True) == [0, 0]
    finally:
        process.stop()


def test_a_process_that_reads_another_tokenizer_is_not_used() -> None:
    other = LongTexts(OPTIONS, VOCAB_SIZE, byte_level())
    with pytest.raises(InternalError, match="read another tokenizer"):
        other.encode(SNIPPET, True)
    assert not other.pids


@pytest.mark.parametrize("ends_by_caller", [True, False])
def test_a_stopped_process_ends_with_its_caller_and_with_the_close(tokenizer: Tokenizer, ends_by_caller: bool) -> None:
    """However it hangs, no thread waits for it any longer then."""
    texts = LongTexts(OPTIONS, VOCAB_SIZE, tokenizer)
    texts.encode(SNIPPET, True)
    (pid,) = texts.pids
    os.kill(pid, signal.SIGSTOP)
    abandonment, errors = Abandonment(), []

    def work() -> None:
        ABANDONMENT.set(abandonment)
        try:
            texts.encode(LONG, True)
        except (InternalError, EngineDeadError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not texts._working:
        time.sleep(0.001)
    if ends_by_caller:
        abandonment.leave()
    else:
        texts.close()
    thread.join(60)
    assert [type(error) for error in errors] == [InternalError if ends_by_caller else EngineDeadError]
    assert has_pid_ended(pid)
    texts.close()


async def test_a_request_that_is_cancelled_ends_the_process_that_works_for_it(weightless_model: Path) -> None:
    options = EngineOptions.from_keywords({"model": str(weightless_model), "tokenizer": "bundled"})
    engine = AsyncLLM.from_options(options, in_process=True, executor="tests.fakes.factories:plain")
    try:
        texts = engine._front_end._long_texts
        assert texts is not None
        assert len(await engine.encode(LONG[:100_000])) > 1000
        assert not texts.pids  # short enough for this process
        engine.input_processor.max_model_len = len(LONG)
        working = asyncio.create_task(engine.encode(LONG))
        while not texts._working:
            await asyncio.sleep(0.001)
        (pid,) = texts.pids
        os.kill(pid, signal.SIGSTOP)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await asyncio.to_thread(has_pid_ended, pid)
        ids = await engine.encode(LONG)
        assert ids == engine.tokenizer.encode_batch([LONG])[0]  # type: ignore[union-attr]
        (pid,) = texts.pids
    finally:
        engine.shutdown()
    assert has_pid_ended(pid)
    with pytest.raises(EngineDeadError):
        texts.encode(LONG, True)


def test_a_process_ends_with_a_parent_that_is_killed() -> None:
    program = f"""
from quire.config.options import EngineOptions
from quire.tokenization.tokenizer import open_tokenizer
from quire.engine.long_texts import LongTexts

options = EngineOptions.from_keywords({{}})
texts = LongTexts(options, {VOCAB_SIZE}, open_tokenizer(options, {VOCAB_SIZE}))
texts.encode("x", True)
print(texts.pids[0], flush=True)
texts.encode("def f(x): return " * 300_000, True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert has_pid_ended(pid)


def test_a_text_that_takes_too_much_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that looks ahead to the end of a run, at each place of the run."""
    backend = byte_level_backend()
    split = pre_tokenizers.Split(Regex("(?<=b)a|a(?=a*c)"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    options = EngineOptions.from_keywords({"tokenizer": str(tmp_path)})
    tokenizer = open_tokenizer(options, VOCAB_SIZE)
    assert tokenizer is not None
    texts = LongTexts(options, VOCAB_SIZE, tokenizer)
    try:
        assert texts.encode("a" * 100, True) == tokenizer.encode("a" * 100)
        [pid] = texts.pids
        monkeypatch.setattr("quire.engine.long_texts.TEXT_SECONDS", 0.0)
        monkeypatch.setattr("quire.engine.long_texts.CHARACTER_SECONDS", 5e-7)
        with pytest.raises(UserError, match=r"takes more than 0\.1 s of processor time for the text of 200000 char"):
            texts.encode("a" * 200_000, True)
        assert has_pid_ended(pid)
        assert texts.pids == []
    finally:
        texts.close()


def test_texts_for_patterns_that_are_not_known_go_there_sooner() -> None:
    for pattern, longest in ((None, 2**18), ("(?<=b)a|a(?=a*c)", 256)):
        backend = byte_level_backend()
        if pattern is not None:
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer = Tokenizer(backend)
        config: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB_SIZE))
        client: Any = None
        FrontEnd(config, client, tokenizer).encode_long_texts_elsewhere(OPTIONS)
        sent: list[str] = []
        tokenizer.encode_elsewhere = lambda text, _, sent=sent: sent.append(text) or []  # type: ignore[misc, func-returns-value]
        tokenizer.encode("a" * longest)
        tokenizer.encode("b" * (longest + 1))
        assert [len(text) for text in sent] == [longest + 1]


def spin(argument: str, content: bytes) -> bytes:
    """In the process: a reader that never ends."""
    while True:
        pass


def echo(argument: str, content: bytes) -> bytes:
    return content


def limit(argument: str, content: bytes) -> bytes:
    return str(signal.getitimer(signal.ITIMER_PROF)[0]).encode()


def test_a_body_that_takes_too_much_processor_time_is_its_callers_error(texts: LongTexts) -> None:
    assert round(float(texts.read(f"{__name__}:limit", "", b""))) == 10
    with pytest.raises(UserError, match="more than 10 s of processor time"):
        texts.read(f"{__name__}:spin_briefly", "", b"")
    assert texts.read(f"{__name__}:echo", "", b"abc") == b"abc"


def spin_briefly(argument: str, content: bytes) -> bytes:
    """As `spin`, with less than the whole time."""
    signal.setitimer(signal.ITIMER_PROF, 0.05)
    return spin(argument, content)


def test_a_stopped_process_ends_its_work_with_an_error_and_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SLICE_SECONDS", 0.02)
    texts = LongTexts(OPTIONS, VOCAB_SIZE, tokenizer)
    try:
        texts.encode(SNIPPET, True)
        (pid,) = texts.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(InternalError, match="it had not run for 20 s"):
            texts.encode(LONG, True)
        assert has_pid_ended(pid)
        assert texts.encode(LONG, True) == tokenizer.encode(LONG)
    finally:
        texts.close()
