"""The pool of helpers: reused, limited, replaced, and gone in the end. The ids of long texts are the tokenizer's."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
from tokenizers import Regex, pre_tokenizers

from quire.config.options import EngineOptions
from quire.errors import ChatTemplateProcessError, EngineDeadError, InternalError, PromptTooLongError, UserError
from quire.tokenization import helpers as helpers_module
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.conversation import conversation_of
from quire.tokenization.helpers import ABANDONMENT, Abandonment, Helper, Helpers
from quire.tokenization.jobs import ReadLimits, TemplateLimits, Tokenising, TokenizerSource, packed
from quire.tokenization.tokenizer import SAMPLE, Tokenizer, open_tokenizer
from quire.utils import patience
from quire.utils.frames import Deadline
from tests.architecture.source import ROOT
from tests.fuzz.templates import BENIGN, LIMITS, MAX_CHARACTERS, TEMPLATES, check_memory
from tests.processes import has_ended, has_pid_ended
from tests.tokenization import readers
from tests.tokenization.build import byte_level, byte_level_backend, written

T = TypeVar("T")
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
TOOLS = [{"name": "f"}]
UNMETERED = (
    "x*x",
    "nested lists printed",
    "nested lists as JSON",
    "in a long list",
    "count in text",
    "find",
    "translate",
    "encoded",
    "to_bytes",
    "format width from argument",
    "format many",
)
"""What a count of a template's steps does not see."""
PATIENT = TemplateLimits(cpu_seconds=600.0, seconds=600.0, queue_seconds=600.0)


OPTIONS = EngineOptions.from_keywords({})
VOCAB_SIZE = 4096
"""Of the bundled model."""
SNIPPET = "def f(x):\n    return 'naïve 你好 \N{FACE WITH TEARS OF JOY}'  # \t <s></s>\n"
LONG = SNIPPET * 6000


@pytest.fixture
def opened() -> Iterator[list[ChatTemplate]]:
    """What is in it is closed."""
    chats: list[ChatTemplate] = []
    yield chats
    for chat in chats:
        chat.helpers.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def chat_of(
    opened: list[ChatTemplate], default: str, tools: str = BENIGN, *, limits: TemplateLimits = PATIENT, **more: Any
) -> ChatTemplate:
    """tools: the template that is taken where there are tools."""
    chat = ChatTemplate({"default": default, "tool_use": tools}, {}, limits=limits, **more)
    opened.append(chat)
    return chat


def until(found: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return value


def source_of(tokenizer: Tokenizer, options: EngineOptions = OPTIONS) -> TokenizerSource:
    return TokenizerSource(msgspec.json.encode(options), VOCAB_SIZE, packed(tokenizer.encode(SAMPLE)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = open_tokenizer(OPTIONS, VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> Iterator[Helpers]:
    helpers = ChatTemplate.of(tokenizer, source_of(tokenizer)).helpers
    yield helpers
    helpers.close()


@pytest.fixture
def own_texts(tokenizer: Tokenizer) -> Iterator[Helpers]:
    """As `texts`, of one test."""
    helpers = ChatTemplate.of(tokenizer, source_of(tokenizer)).helpers
    yield helpers
    helpers.close()


def test_a_process_starts_with_the_first_conversation_and_is_reused(opened: list[ChatTemplate]) -> None:
    chat = chat_of(opened, BENIGN)
    assert chat.helpers.pids == []
    assert written(chat, MESSAGES) == "<user>x"
    [pid] = chat.helpers.pids
    assert written(chat, MESSAGES * 2) == "<user>x" * 2
    assert chat.helpers.pids == [pid]


def test_a_conversation_does_not_wait_for_another_one(opened: list[ChatTemplate], threads: ThreadPoolExecutor) -> None:
    chat = chat_of(opened, FOREVER)
    stuck = threads.submit(written, chat, MESSAGES)
    until(lambda: chat.helpers.pids)
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"
    assert not stuck.done()
    chat.helpers.close()
    with pytest.raises(EngineDeadError):
        stuck.result()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (FOREVER, r"was stopped: it took too long \(a conversation has 0\.1 s of processor time and 60 s in all\)"),
        ("{{ 9 ** 99999999 }}", "was stopped: it took too long"),
        ("{{ [messages] * 99999999 }}", r"was stopped: it needs more than 128\.0 MiB of memory"),
    ],
)
def test_a_limit_ends_one_conversation(source: str, reason: str, opened: list[ChatTemplate]) -> None:
    chat = chat_of(opened, source, limits=LIMITS)
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"
    first = chat.helpers.pids
    with pytest.raises(UserError, match=reason) as caught:
        written(chat, MESSAGES)
    assert caught.value.param == "messages"
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"
    assert chat.helpers.pids != first


@pytest.mark.long
def test_templates_that_once_took_all_time_or_memory(opened: list[ChatTemplate]) -> None:
    """In one pool: each finds the process, or its successor. `make fuzz` tries the rest of the corpus."""
    chat = ChatTemplate({**TEMPLATES, "default": BENIGN}, {}, limits=LIMITS)
    opened.append(chat)
    reasons = set()
    for name in UNMETERED:
        with pytest.raises(UserError, match="was stopped") as caught:
            written(chat, MESSAGES, source=TEMPLATES[name], max_characters=MAX_CHARACTERS)
        reasons.add("memory" in caught.value.message)
        check_memory(chat.helpers)
    assert reasons == {True, False}
    assert written(chat, MESSAGES) == "<user>x"


@pytest.mark.long
def test_the_memory_of_a_rendering_is_limited_behind_a_text_too(
    opened: list[ChatTemplate], tokenizer: Tokenizer
) -> None:
    """What the tokenizer has taken does not count, and what a rendering takes is limited again."""
    chat = chat_of(opened, BENIGN, "{{ [messages] * 99999999 }}", limits=LIMITS, tokenizer=source_of(tokenizer))
    assert chat.helpers.encode(LONG * 4, True) == tokenizer.encode(LONG * 4)
    [pid] = chat.helpers.pids
    assert written(chat, MESSAGES) == "<user>x"
    with pytest.raises(UserError, match="needs more than 128"):
        written(chat, MESSAGES, tools=TOOLS)
    assert chat.helpers.pids != [pid]


def test_a_process_that_does_not_answer_is_killed(opened: list[ChatTemplate], monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(Deadline):
        def apply(self, connection: socket.socket) -> None:
            raise TimeoutError

    chat = chat_of(opened, FOREVER)
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"
    process = psutil.Process(chat.helpers.pids[0])
    with monkeypatch.context() as patched:
        patched.setattr(helpers_module, "Deadline", Expired)
        with pytest.raises(UserError, match="took too long"):
            written(chat, MESSAGES)
    assert has_ended(process)
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"


def test_a_process_that_died_while_idle_is_replaced(opened: list[ChatTemplate]) -> None:
    chat = chat_of(opened, BENIGN)
    written(chat, MESSAGES)
    process = psutil.Process(chat.helpers.pids[0])
    process.kill()
    until(lambda: not chat.helpers._idle[0].is_alive)
    assert written(chat, MESSAGES) == "<user>x"
    assert chat.helpers.pids != [process.pid]


def test_a_process_that_dies_fails_its_conversation_alone(
    opened: list[ChatTemplate], threads: ThreadPoolExecutor
) -> None:
    chat = chat_of(opened, FOREVER)
    dying = threads.submit(written, chat, MESSAGES)
    [pid] = until(lambda: chat.helpers.pids)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChatTemplateProcessError, match=r"was killed by signal 9 \(Killed\)"):
        dying.result()
    assert written(chat, MESSAGES, tools=TOOLS) == "<user>x"


def test_signals_to_all_processes_of_a_service_do_not_end_it(opened: list[ChatTemplate]) -> None:
    chat = chat_of(opened, BENIGN)
    written(chat, MESSAGES)
    [pid] = chat.helpers.pids
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert written(chat, MESSAGES) == "<user>x"
    assert chat.helpers.pids == [pid]


def test_a_process_that_cannot_be_started(
    opened: list[ChatTemplate], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    chat = chat_of(opened, BENIGN, tokenizer=source_of(tokenizer))
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", refuse)
        with pytest.raises(ChatTemplateProcessError, match="cannot be started: Too many open files"):
            written(chat, MESSAGES)
        with pytest.raises(InternalError, match="cannot be started: Too many open files"):
            chat.helpers.encode("x", True)
    assert written(chat, MESSAGES) == "<user>x"


def test_closing_ends_the_processes_and_what_they_do(opened: list[ChatTemplate], threads: ThreadPoolExecutor) -> None:
    chat = chat_of(opened, FOREVER)
    running = threads.submit(written, chat, MESSAGES)
    process = psutil.Process(until(lambda: chat.helpers.pids)[0])
    chat.helpers.close()
    assert has_ended(process)
    with pytest.raises(EngineDeadError, match="shut down"):
        running.result()
    with pytest.raises(EngineDeadError, match="shut down"):
        written(chat, MESSAGES)
    chat.helpers.close()


def test_a_pool_that_is_forgotten_ends_its_processes() -> None:
    chat = ChatTemplate({"default": BENIGN}, {})
    written(chat, MESSAGES)
    process = psutil.Process(chat.helpers.pids[0])
    del chat
    assert has_ended(process, 60)


PARENT = """
import sys, threading, time
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.conversation import conversation_of
from quire.tokenization.jobs import TemplateLimits
chat = ChatTemplate({"default": "ok", "tool_use": sys.argv[1]}, {}, limits=TemplateLimits(cpu_seconds=1.0))
messages = [{"role": "user", "content": "x"}]
chat.write(chat.prepare(conversation_of(messages)))
work = chat.prepare(conversation_of(messages, tools=[{}]))
threading.Thread(target=chat.write, args=(work,), daemon=True).start()
if not sys.argv[1]:
    time.sleep(0.1)
print(chat.helpers.pids[0], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("source", ["", FOREVER], ids=["idle", "rendering"])
def test_nothing_outlives_a_parent_that_is_killed(source: str) -> None:
    """An idle process sees the end of its connection; the timers end one that renders."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, source], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert has_ended(process, 60)


@pytest.mark.parametrize("text", ["", "x", SNIPPET, LONG, "\0" * 70_000, " " * 300_000])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_ids_are_those_of_the_tokenizer_itself(
    texts: Helpers, tokenizer: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    assert texts.encode(text, add_special_tokens) == tokenizer.encode(text, add_special_tokens)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_conversation_becomes_ids_in_one_job(
    opened: list[ChatTemplate], tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    """A short text comes back as it is; one that has too many tokens is refused before it is tokenised."""
    chat = chat_of(opened, BENIGN, tokenizer=source_of(tokenizer))
    how = Tokenising(1000, add_special_tokens, 10**6)

    def write(content: str, how: Tokenising = how) -> tuple[str, list[int] | None]:
        return chat.write(chat.prepare(conversation_of([{"role": "user", "content": content}]), tokenising=how))

    assert write("a" * 994) == ("<user>" + "a" * 994, None)
    long = "<user>" + LONG
    assert write(LONG) == (long, tokenizer.encode(long, add_special_tokens))
    assert len(chat.helpers.pids) == 1
    with pytest.raises(PromptTooLongError, match="maximum context length is 10 tokens") as caught:
        write("a b " * 100_000, Tokenising(1000, add_special_tokens, 10))
    assert caught.value.param == "messages"
    assert len(chat.helpers.pids) == 1


@pytest.mark.long
def test_one_process_does_jobs_one_after_the_other_and_several_those_at_once(
    own_texts: Helpers, tokenizer: Tokenizer, threads: ThreadPoolExecutor
) -> None:
    own_texts.encode(SNIPPET, True)
    own_texts.encode(SNIPPET, True)
    [pid] = own_texts.pids
    os.kill(pid, signal.SIGSTOP)
    found = [threads.submit(own_texts.encode, LONG, True)]
    until(lambda: own_texts._working)
    found.append(threads.submit(own_texts.encode, LONG, True))
    until(lambda: len(own_texts.pids) == 2)
    os.kill(pid, signal.SIGCONT)
    assert [future.result() for future in found] == [tokenizer.encode(LONG)] * 2


def test_a_process_that_is_killed_fails_its_text_alone(
    own_texts: Helpers, tokenizer: Tokenizer, threads: ThreadPoolExecutor
) -> None:
    own_texts.encode(SNIPPET, True)
    [pid] = own_texts.pids
    os.kill(pid, signal.SIGSTOP)
    dying = threads.submit(own_texts.encode, LONG, True)
    until(lambda: own_texts._working)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="was killed by signal 9"):
        dying.result()
    assert own_texts.encode(LONG, True) == tokenizer.encode(LONG)


def test_what_is_wrong_with_a_text_is_its_callers_error(tmp_path: Path) -> None:
    """The word-level tokenizer of this directory has no token for unknown words."""
    vocabulary = '{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}'
    (tmp_path / "tokenizer.json").write_text(
        f'{{"version": "1.0", "added_tokens": [], "model": {vocabulary}, "pre_tokenizer": {{"type": "Whitespace"}}}}'
    )
    options = EngineOptions.from_keywords({"tokenizer": str(tmp_path)})
    tokenizer = open_tokenizer(options, VOCAB_SIZE)
    assert tokenizer is not None
    helpers = ChatTemplate.of(tokenizer, TokenizerSource(msgspec.json.encode(options), VOCAB_SIZE, None)).helpers
    try:
        with pytest.raises(UserError, match=r"^the tokenizer cannot encode the text"):
            helpers.encode("b", True)
        pids = helpers.pids
        assert helpers.encode("a a", True) == [0, 0]
        assert helpers.pids == pids
    finally:
        helpers.close()


def test_a_process_that_reads_another_tokenizer_is_not_used() -> None:
    other = byte_level()
    helpers = ChatTemplate.of(other, source_of(other)).helpers
    with pytest.raises(InternalError, match="read another tokenizer"):
        helpers.encode(SNIPPET, True)
    assert not helpers.pids


@pytest.mark.parametrize("ends_by_caller", [True, False])
def test_a_stopped_process_ends_with_its_caller_and_with_the_close(own_texts: Helpers, ends_by_caller: bool) -> None:
    """However it hangs, no thread waits for it any longer then."""
    own_texts.encode(SNIPPET, True)
    (pid,) = own_texts.pids
    os.kill(pid, signal.SIGSTOP)
    abandonment, errors = Abandonment(), []

    def work() -> None:
        ABANDONMENT.set(abandonment)
        try:
            own_texts.encode(LONG, True)
        except (InternalError, EngineDeadError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: abandonment._end is not None)
    if ends_by_caller:
        abandonment.leave()
    else:
        own_texts.close()
    thread.join(60)
    assert [type(error) for error in errors] == [InternalError if ends_by_caller else EngineDeadError]
    assert has_pid_ended(pid)


def test_a_process_whose_caller_leaves_as_it_answers_takes_no_other_job(
    own_texts: Helpers, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may end a process after the next job has found it alive."""
    abandonment, ask = Abandonment(), Helper._patiently

    def leave_behind_the_answer(helper: Helper, *args: Any) -> Any:
        answer = ask(helper, *args)
        abandonment.leave()
        return answer

    monkeypatch.setattr(Helper, "_patiently", leave_behind_the_answer)
    ABANDONMENT.set(abandonment)
    own_texts.encode(SNIPPET, True)
    ABANDONMENT.set(None)
    monkeypatch.setattr(Helper, "_patiently", ask)
    monkeypatch.setattr(Helper, "is_alive", True)
    assert own_texts.encode(SNIPPET, True) == tokenizer.encode(SNIPPET)


def test_a_process_that_tokenises_ends_with_a_parent_that_is_killed() -> None:
    program = f"""
import msgspec
from quire.config.options import EngineOptions
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.jobs import TokenizerSource
from quire.tokenization.tokenizer import open_tokenizer

options = EngineOptions.from_keywords({{}})
source = TokenizerSource(msgspec.json.encode(options), {VOCAB_SIZE}, None)
helpers = ChatTemplate.of(open_tokenizer(options, {VOCAB_SIZE}), source).helpers
helpers.encode("x", True)
print(helpers.pids[0], flush=True)
helpers.encode("def f(x): return " * 300_000, True)
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
    helpers = ChatTemplate.of(tokenizer, source_of(tokenizer, options)).helpers
    try:
        assert helpers.encode("a" * 100, True) == tokenizer.encode("a" * 100)
        [pid] = helpers.pids
        monkeypatch.setattr(helpers_module, "seconds_of", lambda text: 5e-7 * len(text))
        with pytest.raises(UserError, match=r"takes more than 0\.1 s of processor time for the text of 200000 char"):
            helpers.encode("a" * 200_000, True)
        assert has_pid_ended(pid)
        assert helpers.pids == []
    finally:
        helpers.close()


def test_a_body_that_takes_too_much_processor_time_is_its_callers_error(texts: Helpers) -> None:
    assert round(float(texts.read(f"{readers.__name__}:limit", "", []))) == 10
    with pytest.raises(UserError, match="more than 10 s of processor time"):
        texts.read(f"{readers.__name__}:spin_briefly", "", [b""])
    assert texts.read(f"{readers.__name__}:echo", "", [b"ab", b"c"]) == b"abc"


def test_a_file_beyond_its_own_limits_is_its_callers_error(texts: Helpers) -> None:
    limits = ReadLimits(60.0, 2**26, "x.y: the video", "x.y")
    assert round(float(texts.read(f"{readers.__name__}:limit", "", [], limits))) == 60
    for reader, message in (
        ("hoard", "x.y: the video takes more than 64.0 MiB of memory to read"),
        ("spin_briefly", "x.y: the video takes more than 60 s of processor time to read"),
        ("crash", "x.y: the video makes its reader fail, and may be damaged"),
    ):
        with pytest.raises(UserError) as caught:
            texts.read(f"{readers.__name__}:{reader}", "", [b""], limits)
        assert (str(caught.value), caught.value.param) == (message, "x.y")
        assert texts.pids == [], "the process is replaced"
    with pytest.raises(InternalError, match="signal 11"):
        texts.read(f"{readers.__name__}:crash", "", [b""])
    assert texts.read(f"{readers.__name__}:echo", "", [b"a"], limits) == b"a"
    assert len(texts.read(f"{readers.__name__}:hoard", "", [b""])) == 2**27, "the next job has no limit of memory"


def test_a_file_whose_caller_leaves_is_read_no_further(own_texts: Helpers, threads: ThreadPoolExecutor) -> None:
    abandonment = Abandonment()

    def read() -> bytes | bytearray:
        ABANDONMENT.set(abandonment)
        return own_texts.read(f"{readers.__name__}:spin", "", [b""])

    reading = threads.submit(read)
    until(lambda: own_texts.pids)
    abandonment.leave()
    with pytest.raises(InternalError, match=r"signal 9|has left"):
        reading.result()


@pytest.mark.long
def test_a_stopped_process_ends_its_work_with_an_error_and_is_replaced(
    own_texts: Helpers, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SLICE_SECONDS", 0.02)
    own_texts.encode(SNIPPET, True)
    (pid,) = own_texts.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(InternalError, match="it had not run for 20 s"):
        own_texts.encode(LONG, True)
    assert has_pid_ended(pid)
    assert own_texts.encode(LONG, True) == tokenizer.encode(LONG)
