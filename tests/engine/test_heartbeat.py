"""When an engine process counts as silent, and which thread beats."""

from __future__ import annotations

import contextlib
import os
import select
import threading

import pytest

from quire.clock import VirtualClock
from quire.engine.heartbeat import BEAT_SECONDS, MAX_GAP, SILENCE_LIMIT, Heartbeat, check_responsive, start_beating
from quire.errors import EngineUnresponsiveError


def is_silent(heartbeat: Heartbeat) -> bool:
    try:
        check_responsive(heartbeat.silence)
    except EngineUnresponsiveError:
        return True
    return False


def test_no_beat_for_the_limit_is_silence_and_a_beat_ends_it() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    heartbeat.beat()
    for _ in range(int(SILENCE_LIMIT / BEAT_SECONDS)):
        assert not is_silent(heartbeat)
        clock.advance(BEAT_SECONDS)
        heartbeat.look()
    assert is_silent(heartbeat)
    with pytest.raises(EngineUnresponsiveError, match="the engine process has not answered for 5 s"):
        check_responsive(heartbeat.silence)
    heartbeat.beat()
    assert heartbeat.silence == 0.0


def test_silence_is_noticed_between_two_looks() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    for _ in range(4):
        clock.advance(BEAT_SECONDS)
        heartbeat.look()
    clock.advance(0.99)
    assert not is_silent(heartbeat)
    clock.advance(0.01)
    assert is_silent(heartbeat)


def test_beats_during_a_step_of_a_minute_keep_it_alive() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    for _ in range(20):
        clock.advance(3.0)  # a busy machine: a beat every three seconds instead of every second
        heartbeat.look()
        assert not is_silent(heartbeat)
        heartbeat.beat()


def test_time_in_which_the_observer_itself_was_stopped_is_no_silence() -> None:
    """A machine that was suspended for an hour: both processes go on at the same time."""
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    clock.advance(BEAT_SECONDS)
    heartbeat.look()
    clock.advance(3600.0)
    assert heartbeat.silence == BEAT_SECONDS + MAX_GAP
    heartbeat.look()
    assert not is_silent(heartbeat), "the engine has had no time to beat yet"
    heartbeat.beat()
    assert heartbeat.silence == 0.0


def read_beat(reader: int) -> bytes:
    ready, _, _ = select.select([reader], [], [], 60)
    assert ready, "no beat came"
    return os.read(reader, 65536)


def beating_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_full_pipe_stops_no_beat_and_the_beats_end_with_the_reader() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    start_beating(writer)
    while b"." not in read_beat(reader):
        pass
    [thread] = beating_threads()
    os.close(reader)
    thread.join(60)
    assert not thread.is_alive()
    os.close(writer)
