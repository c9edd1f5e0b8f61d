"""Processes of the constraint service that die or hang: sequences go on, a culprit ends, nothing loops or is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.errors import UserError
from quire.structured_output import mask_client
from quire.structured_output import service as service_module
from quire.structured_output.messages import RehearsalLimits
from quire.structured_output.remote_matcher import RemoteMatcher
from quire.structured_output.service import ConstraintService
from tests.structured_output.faulty_server import token_of
from tests.structured_output.services import (
    DEADLINE,
    FAULTY_SERVER,
    advance,
    begin,
    children,
    make_service,
    settle,
    start,
    text_of,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("copied_helpers")
TEXT = text_of(regex="[a-z!?#]{1,40}")
OTHER = text_of(regex="([a-z]|[!?#]){1,40}")


@pytest.fixture
def service() -> Iterator[ConstraintService]:
    service = make_service(module=FAULTY_SERVER)
    yield service
    service.close()


@pytest.fixture
def quick_to_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_client, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(mask_client, "LOOK_SECONDS", 0.05)


def running(service: ConstraintService, num_sequences: int) -> list[RemoteMatcher]:
    """Matchers that have followed some tokens."""
    matchers = [start(service, TEXT) for _ in range(num_sequences)]
    for number, matcher in enumerate(matchers):
        advance(service, matcher, *[token_of("a")] * (number + 1))
    return matchers


def masks_process(service: ConstraintService) -> int:
    assert service._process is not None
    server = service._process.pid
    _wait_until(lambda: bool(children(server, "quire: masks")))
    [pid] = children(server, "quire: masks")
    return pid


def goes_on(service: ConstraintService, matcher: RemoteMatcher, num_left: int) -> None:
    """Follow `num_left` more characters, as if nothing had happened; the text ends there."""
    for _ in range(num_left):
        mask = matcher.mask()
        assert mask is not None
        assert mask[token_of("b") // 8] >> token_of("b") % 8 & 1
        advance(service, matcher, token_of("b"))
        assert (matcher.error, matcher.num_accepted) == (None, 1)
    assert matcher.is_finished


@pytest.mark.parametrize("fault", ["!", "#"])
def test_a_sequence_that_crashes_the_process_ends_and_others_go_on(service: ConstraintService, fault: str) -> None:
    others, culprit = running(service, 3), start(service, OTHER)
    sibling = culprit.constraint.matcher(culprit.spec, [])
    settle(service, sibling)
    others[0].advance([token_of("a")], 0)
    culprit.advance([token_of(fault)], 0)
    others[1].advance([token_of("a")], 0)
    service.flush()
    wait_until(service, lambda: culprit.error is not None)
    settle(service, *others, culprit, sibling)
    assert culprit.error is not None
    assert "crashes or hangs" in culprit.error.message
    with pytest.raises(UserError, match="crashes or hangs"):
        culprit.mask()
    assert sibling.error is not None
    with pytest.raises(UserError, match="crashes or hangs"):
        service.constraint(OTHER)
    for number, matcher in enumerate(others):
        goes_on(service, matcher, 40 - (number + 1) - (number < 2))


def test_a_mask_that_is_waited_for_crashes(service: ConstraintService) -> None:
    [other], culprit = running(service, 1), start(service, OTHER)
    culprit.advance([token_of("#")], 0)
    settle(service, culprit)
    with pytest.raises(UserError, match="crashes or hangs"):
        culprit.mask()
    goes_on(service, other, 39)


def test_a_sequence_that_hangs_ends_and_others_go_on(service: ConstraintService, quick_to_suspect: None) -> None:
    others, culprit = running(service, 2), start(service, OTHER)
    culprit.advance([token_of("?")], 0)
    others[0].advance([token_of("a")], 0)
    settle(service, others[0])
    assert not culprit.is_ready
    settle(service, culprit)
    assert culprit.error is not None
    goes_on(service, others[0], 38)
    goes_on(service, others[1], 38)


def test_several_culprits_are_found_one_by_one(service: ConstraintService) -> None:
    others = running(service, 2)
    culprits = [start(service, text_of(regex=f"({letter}|[!a-z]){{1,9}}")) for letter in "abc"]
    for matcher in (*others, *culprits):
        matcher.advance([token_of("!" if matcher in culprits else "a")], 0)
    settle(service, *others, *culprits)
    assert [each.error is not None for each in culprits] == [True] * 3
    assert [each.error for each in others] == [None] * 2
    goes_on(service, others[0], 38)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_mask_process_that_is_killed_or_stopped_is_replaced(
    service: ConstraintService, quick_to_suspect: None, kill: signal.Signals
) -> None:
    matchers = running(service, 3)
    copy = matchers[0].copy()
    for matcher in matchers:
        matcher.advance([token_of("c")], 0)
    pid = masks_process(service)
    os.kill(pid, kill)
    _wait_until(lambda: _state(pid) in "TZ")
    settle(service, *matchers, copy)
    assert masks_process(service) != pid
    for number, matcher in enumerate(matchers):
        goes_on(service, matcher, 40 - (number + 1) - 1)
    goes_on(service, copy, 39)


def test_a_copy_of_a_sequence_that_the_new_process_does_not_follow_yet(service: ConstraintService) -> None:
    [matcher] = running(service, 1)
    before = service.masks.connection
    os.kill(masks_process(service), signal.SIGKILL)
    wait_until(service, lambda: service.masks.connection is not before)
    service.flush()
    again = service.masks.connection
    copy = matcher.copy()
    settle(service, matcher, copy)
    for each in (matcher, copy):
        goes_on(service, each, 39)
    assert service.masks.connection is again


def test_masks_are_made_again_for_sequences_that_had_one(service: ConstraintService) -> None:
    matchers = running(service, 3)
    masks = [matcher.mask() for matcher in matchers]
    for _ in range(2):
        before = service.masks.connection
        os.kill(masks_process(service), signal.SIGKILL)
        wait_until(service, lambda before=before: service.masks.connection is not before)  # type: ignore[misc]
        assert [matcher.mask() for matcher in matchers] == masks


def test_a_fork_server_that_is_killed_is_replaced(service: ConstraintService) -> None:
    matchers = running(service, 2)
    assert service._process is not None
    os.kill(service._process.pid, signal.SIGKILL)
    new = begin(service, text_of(choice=["another"]))
    matchers[0].advance([token_of("c")], 0)
    settle(service, new, matchers[0])
    assert (new.error, matchers[0].error) == (None, None)
    goes_on(service, matchers[0], 38)
    goes_on(service, matchers[1], 38)


def test_a_fork_server_that_is_stopped_is_replaced(service: ConstraintService, monkeypatch: pytest.MonkeyPatch) -> None:
    start(service, TEXT)
    stopped = service._process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    _wait_until(lambda: _state(stopped.pid) == "T")
    new = begin(service, OTHER)
    [job] = service._jobs.values()
    for waited in (-3600.0, service_module.HANG_SECONDS + 1):
        assert service._process is stopped
        job.deadline = time.monotonic() - waited
        service._last_sign = job.deadline - service._limits.seconds
        service.wait_answer(0.0)
    settle(service, new)
    assert new.error is None
    assert service._process is not stopped


def test_a_fork_server_that_is_killed_while_a_mask_is_waited_for(service: ConstraintService) -> None:
    [matcher, other] = running(service, 2)
    assert service._process is not None
    pids = [service._process.pid, masks_process(service)]
    matcher.advance([token_of("c")], 0)
    os.kill(service._process.pid, signal.SIGKILL)
    _wait_until(lambda: not any(map(_lives, pids)))
    assert matcher.mask() is not None
    settle(service, matcher, other)
    goes_on(service, matcher, 38)
    goes_on(service, other, 38)


@pytest.fixture
def patient_service() -> Iterator[ConstraintService]:
    service = make_service(RehearsalLimits(seconds=600.0))
    yield service
    service.close()


def begin_and_end(service: ConstraintService, number: signal.Signals) -> RemoteMatcher:
    """A matcher of OTHER, whose rehearsal has this signal."""
    start(service, TEXT)
    wait_until(service, lambda: len(rehearsals(service)) == 2)
    spare = rehearsals(service)
    for pid in spare:  # one of them gets the next text, and does not begin with it
        os.kill(pid, signal.SIGSTOP)
    matcher = begin(service, OTHER)
    wait_until(service, lambda: len(rehearsals(service)) == 3)
    for pid in spare:
        os.kill(pid, number)
        if number != signal.SIGKILL:  # which a process that is stopped takes
            os.kill(pid, signal.SIGCONT)
    return matcher


def rehearsals(service: ConstraintService) -> list[int]:
    assert service._process is not None
    return children(service._process.pid, "quire: rehearse")


def test_a_rehearsal_that_is_killed_is_made_again(patient_service: ConstraintService) -> None:
    """Something else than its limits kills it, such as a system without memory."""
    matcher = begin_and_end(patient_service, signal.SIGKILL)
    settle(patient_service, matcher)
    assert matcher.error is None
    assert start(patient_service, OTHER).error is None


def test_a_rehearsal_that_crashes_is_not_made_again(patient_service: ConstraintService) -> None:
    matcher = begin_and_end(patient_service, signal.SIGSEGV)
    settle(patient_service, matcher)
    assert matcher.error is not None
    assert "too deeply" in matcher.error.message
    with pytest.raises(UserError, match="too deeply"):
        patient_service.constraint(OTHER)


def test_a_rehearsal_that_is_killed_twice_is_a_verdict() -> None:
    service = make_service(RehearsalLimits(cpu_seconds=(600.0,), seconds=600.0))
    start(service, text_of(choice=["a"]))
    text = text_of(json={"type": "integer", "multipleOf": 2147483648})
    slow = begin(service, text)

    seen: dict[int, float] = {}

    def kill() -> bool:
        """Kill the one at work and those that wait for a text, of which one gets this text when the first has died.
        Each lives for a moment, in which it may get it."""
        for pid in rehearsals(service):
            if time.monotonic() > seen.setdefault(pid, time.monotonic()) + 0.5:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return slow.is_ready

    wait_until(service, kill)
    settle(service, slow)
    assert slow.error is not None
    assert "twice" in slow.error.message
    with pytest.raises(UserError, match="twice"):
        service.constraint(text)
    assert start(service, text_of(choice=["b"])).error is None
    service.close()


def test_a_mask_process_that_ends_again_and_again() -> None:
    service = make_service(module="tests.structured_output.server_without_masks")
    matcher = start(service, text_of(choice=["a"]))
    assert matcher.error is not None
    assert "out of order" in matcher.error.message
    service.close()


def test_a_fork_server_that_ends_again_and_again() -> None:
    service = make_service(module="tests.structured_output.server_that_ends")
    for _ in range(2):  # each request tries
        matcher = start(service, text_of(choice=["a"]))
        assert matcher.error is not None
        assert "exited with status 3" in matcher.error.message
    service.close()


class Room:
    """The system's room for another process. num_failing: starts that fail before there is some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> None:
        self.num_failing = 0
        self._work = getattr(target, name)
        monkeypatch.setattr(target, name, self._try)

    def _try(self, *arguments: Any) -> Any:
        if self.num_failing > 0:
            self.num_failing -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return self._work(*arguments)


ALWAYS = 10**9


def test_a_fork_server_that_cannot_be_started_refuses_what_waits_for_it(
    service: ConstraintService, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, service_module, "start_interpreter")
    room.num_failing = ALWAYS
    service.idle()
    matcher = start(service, TEXT)
    assert matcher.error is not None
    assert "cannot be started" in matcher.error.message
    room.num_failing = 2
    [matcher] = running(service, 1)
    goes_on(service, matcher, 39)


@pytest.mark.parametrize("num_failing", [2, ALWAYS])
def test_a_fork_server_that_is_killed_and_cannot_be_started_again(
    service: ConstraintService, monkeypatch: pytest.MonkeyPatch, num_failing: int
) -> None:
    """At work for a sequence, whose text needs no rehearsal."""
    room = Room(monkeypatch, service_module, "start_interpreter")
    [matcher] = running(service, 1)
    room.num_failing = num_failing
    assert service._process is not None
    pids = [service._process.pid, masks_process(service)]
    os.kill(pids[0], signal.SIGKILL)
    _wait_until(lambda: not any(map(_lives, pids)))
    matcher.advance([token_of("c")], 0)
    settle(service, matcher)
    if num_failing == ALWAYS:
        assert matcher.error is not None
        assert "out of order" in matcher.error.message
        room.num_failing = 0
        [matcher] = running(service, 1)
        advance(service, matcher, token_of("c"))
    goes_on(service, matcher, 38)


@pytest.mark.parametrize("target", [mask_client.socket, mask_client.os, mask_client])
def test_a_mask_process_for_which_there_are_no_descriptors_for_a_moment(
    service: ConstraintService, monkeypatch: pytest.MonkeyPatch, target: object
) -> None:
    service.idle()
    name = {"socket": "socketpair", "os": "dup"}.get(getattr(target, "__name__", ""), "make_memory")
    Room(monkeypatch, target, name).num_failing = 2
    [matcher] = running(service, 1)
    goes_on(service, matcher, 39)


PARENT = """
import time
from tests.structured_output.services import begin, children, make_service, start, text_of
service = make_service()
start(service, text_of(choice=["a"]))
slow = begin(service, text_of(json={"type": "integer", "multipleOf": 2147483648}))
pid = service._process.pid
print(pid, *children(pid, "quire: masks"), *children(pid, "quire: rehearse"), flush=True)
END
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "service.close(); time.sleep(600)", "pass"])
def test_all_ends_with_the_parent(end: str) -> None:
    """Killed, or at its end without `close`; and with `close`."""
    command = [sys.executable, "-c", PARENT.replace("END", end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 3
        if end == "time.sleep(600)":
            parent.kill()
        _wait_until(lambda: not any(map(_lives, pids)))
        parent.kill()


def test_signals_to_all_processes_of_a_service_end_none(service: ConstraintService) -> None:
    matchers = running(service, 1)
    assert service._process is not None
    pids = [service._process.pid, masks_process(service), *children(service._process.pid, "quire: rehearse")]
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    goes_on(service, matchers[0], 39)
    assert all(map(_lives, pids))


def _lives(pid: int) -> bool:
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    """The letter of its state in /proc. Z: it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)
