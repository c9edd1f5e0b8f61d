"""The processes that render chat templates: reused, limited, replaced, and gone in the end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import datetime
from typing import Any

import psutil
import pytest

from quire.errors import ChatTemplateProcessError, EngineDeadError, QuireError, UserError
from quire.tokenization import template_client
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.template_client import SHORT_CONVERSATION_BYTES, TemplateLane
from quire.tokenization.template_messages import Deadline, Failed, Render, Rendered, Setup, TemplateLimits, encode_frame
from tests.architecture.source import ROOT
from tests.fuzz.templates import BENIGN, LIMITS, MAX_CHARACTERS, TEMPLATES, check_memory
from tests.processes import has_ended

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


@pytest.fixture
def lanes() -> Iterator[list[TemplateLane | ChatTemplate]]:
    """What is in it is closed."""
    opened: list[TemplateLane | ChatTemplate] = []
    yield opened
    for each in opened:
        each.close()


def lane_of(sources: dict[str, str], limits: TemplateLimits, **options: Any) -> TemplateLane:
    return TemplateLane(Setup(sources, {}, limits), **options)


def ask(lane: TemplateLane, name: str) -> Future[Rendered | Failed]:
    frame = encode_frame(Render(name, {"messages": MESSAGES}, datetime(2026, 11, 21), MAX_CHARACTERS))
    return lane.submit(frame, MAX_CHARACTERS, lambda answer: answer)


def wait_for_pid(lane: TemplateLane) -> int:
    deadline = time.monotonic() + 60
    while lane.pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return lane.pid


def test_a_process_starts_with_the_first_conversation_and_is_reused(lanes: list[Any]) -> None:
    chat = ChatTemplate({"default": BENIGN}, {})
    lanes.append(chat)
    short, long = chat.lanes
    assert (short.pid, long.pid) == (None, None)
    assert chat.render(MESSAGES) == "<user>x"
    first = short.pid
    assert first is not None
    assert chat.render(MESSAGES * 2) == "<user>x" * 2
    assert short.pid == first
    assert long.pid is None


def test_long_conversations_have_a_process_of_their_own(lanes: list[Any]) -> None:
    chat = ChatTemplate({"default": "{{ messages | length }}", "tool_use": FOREVER}, {}, limits=PATIENT)
    lanes.append(chat)
    content = "x" * SHORT_CONVERSATION_BYTES
    long = [{"role": "user", "content": content}]
    stuck = chat.submit(long, tools=TOOLS)
    assert chat.render(MESSAGES) == "1"
    assert not stuck.done()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (FOREVER, r"was stopped: it took too long \(a conversation has 0\.1 s of processor time and 60 s in all\)"),
        ("{{ 9 ** 99999999 }}", "was stopped: it took too long"),
        ("{{ [messages] * 99999999 }}", r"was stopped: it needs more than 128\.0 MiB of memory"),
    ],
)
def test_a_limit_ends_one_conversation(source: str, reason: str, lanes: list[Any]) -> None:
    chat = ChatTemplate({"default": source, "tool_use": BENIGN}, {}, limits=LIMITS)
    lanes.append(chat)
    assert chat.render(MESSAGES, tools=TOOLS) == "<user>x"
    first = chat.lanes[0].pid
    with pytest.raises(UserError, match=reason) as caught:
        chat.render(MESSAGES)
    assert caught.value.param == "messages"
    assert chat.render(MESSAGES, tools=TOOLS) == "<user>x"
    assert chat.lanes[0].pid != first


def test_templates_that_once_took_all_time_or_memory(lanes: list[Any]) -> None:
    """By one lane: each finds the process, or its successor. `make fuzz` tries the rest of the corpus."""
    lane = lane_of({**TEMPLATES, "benign": BENIGN}, LIMITS)
    lanes.append(lane)
    kinds = set()
    for name in UNMETERED:
        answer = ask(lane, name).result()
        assert isinstance(answer, Failed), name
        kinds.add(answer.kind)
        check_memory(lane)
    assert kinds == {"time", "memory"}
    assert ask(lane, "benign").result() == Rendered("<user>x")


def test_a_process_that_does_not_answer_is_killed(lanes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(Deadline):
        def apply(self, connection: socket.socket) -> None:
            raise TimeoutError

    lane = lane_of({"forever": FOREVER, "benign": BENIGN}, PATIENT)
    lanes.append(lane)
    assert ask(lane, "benign").result() == Rendered("<user>x")
    process = psutil.Process(wait_for_pid(lane))
    with monkeypatch.context() as patched:
        patched.setattr(template_client, "Deadline", Expired)
        assert ask(lane, "forever").result() == Failed("time")
    assert has_ended(process)
    assert ask(lane, "benign").result() == Rendered("<user>x")


def test_a_process_that_died_while_idle_is_replaced(lanes: list[Any]) -> None:
    lane = lane_of({"benign": BENIGN}, PATIENT)
    lanes.append(lane)
    ask(lane, "benign").result()
    process = psutil.Process(wait_for_pid(lane))
    process.kill()
    assert has_ended(process)
    assert ask(lane, "benign").result() == Rendered("<user>x")
    assert lane.pid != process.pid


def test_a_process_that_dies_fails_its_conversation_alone(lanes: list[Any]) -> None:
    lane = lane_of({"forever": FOREVER, "benign": BENIGN}, PATIENT)
    lanes.append(lane)
    dying, waiting = ask(lane, "forever"), ask(lane, "benign")
    os.kill(wait_for_pid(lane), signal.SIGKILL)
    with pytest.raises(ChatTemplateProcessError, match=r"was killed by signal 9 \(Killed\)"):
        dying.result()
    assert waiting.result() == Rendered("<user>x")


def test_signals_to_all_processes_of_a_service_do_not_end_it(lanes: list[Any]) -> None:
    lane = lane_of({"benign": BENIGN}, PATIENT)
    lanes.append(lane)
    ask(lane, "benign").result()
    pid = wait_for_pid(lane)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert ask(lane, "benign").result() == Rendered("<user>x")
    assert lane.pid == pid


def test_a_conversation_does_not_wait_for_ever(lanes: list[Any]) -> None:
    now = [100.0]
    lane = lane_of(
        {"forever": FOREVER, "benign": BENIGN}, TemplateLimits(600, 600, queue_seconds=30), clock=lambda: now[0]
    )
    lanes.append(lane)
    first, second = ask(lane, "forever"), ask(lane, "benign")
    pid = wait_for_pid(lane)
    now[0] = 131.0
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChatTemplateProcessError):
        first.result()
    with pytest.raises(QuireError, match="this one has waited 31 seconds"):
        second.result()
    assert ask(lane, "benign").result() == Rendered("<user>x")


def test_a_process_that_cannot_be_started(lanes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    lane = lane_of({"benign": BENIGN}, PATIENT)
    lanes.append(lane)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", refuse)
        with pytest.raises(ChatTemplateProcessError, match="cannot be started: Too many open files"):
            ask(lane, "benign").result()
    assert ask(lane, "benign").result() == Rendered("<user>x")


def test_closing_ends_the_process_and_what_waits_for_it() -> None:
    lane = lane_of({"forever": FOREVER, "benign": BENIGN}, PATIENT)
    running, waiting = ask(lane, "forever"), ask(lane, "benign")
    process = psutil.Process(wait_for_pid(lane))
    lane.close()
    assert has_ended(process)
    for future in (running, waiting):
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()
    with pytest.raises(EngineDeadError, match="shut down"):
        ask(lane, "benign")
    lane.close()


def test_a_lane_that_is_forgotten_ends_its_process() -> None:
    lane = lane_of({"benign": BENIGN}, PATIENT)
    ask(lane, "benign").result()
    process = psutil.Process(wait_for_pid(lane))
    del lane
    assert has_ended(process, 60)


PARENT = """
import sys, time
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.template_messages import TemplateLimits
chat = ChatTemplate({"default": "ok", "tool_use": sys.argv[1]}, {}, limits=TemplateLimits(cpu_seconds=1.0))
chat.render([{"role": "user", "content": "x"}])
stuck = chat.submit([{"role": "user", "content": "x"}], tools=[{}] if sys.argv[1] else None)
if not sys.argv[1]:
    stuck.result()
print(chat.lanes[0].pid, flush=True)
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
