"""When an engine process counts as silent, and which thread beats."""

from __future__ import annotations

import contextlib
import os
import select
import threading

import pytest

from quire.clock import VirtualClock
from quire.engine.heartbeat import ENGINE_STOPPED, EngineBeats, check_responsive
from quire.errors import EngineUnresponsiveError
from quire.executors.interface import VitalSigns
from quire.utils.heartbeat import (
    BEAT_SECONDS,
    IDLE,
    LONGEST,
    MAX_GAP,
    MIN_CPU_SHARE,
    SILENCE_LIMIT,
    Heartbeat,
    Progress,
    decode_beats,
    decode_stopped,
    encode_beat,
    start_beating,
)


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
    with pytest.raises(EngineUnresponsiveError, match="the engine process has not answered for 4 s"):
        check_responsive(heartbeat.silence)
    heartbeat.beat()
    assert heartbeat.silence == 0.0


def test_silence_is_noticed_between_two_looks() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    for _ in range(int(SILENCE_LIMIT / BEAT_SECONDS) - 1):
        clock.advance(BEAT_SECONDS)
        heartbeat.look()
    clock.advance(0.75 * BEAT_SECONDS)
    assert not is_silent(heartbeat)
    clock.advance(0.25 * BEAT_SECONDS)
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
    start_beating(writer, lambda: 7)
    while b"\x07" not in read_beat(reader):
        pass
    [thread] = beating_threads()
    os.close(reader)
    thread.join(60)
    assert not thread.is_alive()
    os.close(writer)


class Busy:
    """Processor time of a process that uses a share of a core."""

    def __init__(self, clock: VirtualClock, share: float) -> None:
        self._clock = clock
        self.share = share
        self._seconds = 0.0

    def __call__(self) -> float:
        self._seconds += self.share * BEAT_SECONDS
        return self._seconds


def test_a_dead_lock_is_told_from_a_long_step_and_from_an_idle_loop() -> None:
    clock = VirtualClock()
    cpu = Busy(clock, share=0.9)
    progress = Progress(clock, cpu)

    def beats(count: int, *, turns: bool = False) -> float:
        for _ in range(count):
            clock.advance(BEAT_SECONDS)
            if turns:
                progress.turn()
            stalled = progress.look()
        return stalled

    assert beats(1000) == 0.0, "a step of minutes"
    cpu.share = 2 * MIN_CPU_SHARE
    assert beats(1000) == 0.0, "the same on a machine that has other things to do"
    cpu.share = 0.0
    assert beats(1000, turns=True) == 0.0, "a loop that waits for messages"
    assert beats(8) == 8 * BEAT_SECONDS, "a dead-lock"
    with progress.exempt():
        assert beats(100) == 0.0, "weights come from a slow disk"
    assert beats(2) == 2 * BEAT_SECONDS
    assert beats(1, turns=True) == 0.0


def test_an_engine_speaks_for_its_ranks() -> None:
    beats = EngineBeats()
    assert decode_beats(bytes([beats.byte()])) == 0.0, "it starts"
    signs = VitalSigns(silence=3.0, stalled=0.0)
    beats.vital_signs = lambda: signs
    assert decode_beats(bytes([beats.byte()])) == 3.0, "one rank is stopped, the others compute"
    signs = VitalSigns(silence=0.5, stalled=60.0)
    beats.progress.turn()
    assert decode_beats(bytes([beats.byte()])) == 0.5, "no rank gets on, but the loop does"


def test_a_process_that_is_stalled_for_long_is_silent_for_longer() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)
    for tenths in range(0, 400, 5):
        clock.advance(BEAT_SECONDS)
        heartbeat.beat(encode_beat(tenths / 10) / 10)
        assert heartbeat.silence == pytest.approx(tenths / 10), "also beyond what a byte can say"
    assert encode_beat(1000.0) == LONGEST
    heartbeat.beat(0.0)
    assert heartbeat.silence == 0.0


def test_a_stopped_rank_is_named_at_once() -> None:
    """By a byte of its own; no byte of silence or idleness names one."""
    beats = EngineBeats()
    beats.vital_signs = lambda: VitalSigns(silence=0.2, stalled=0.1, stopped=63)
    named = bytes([beats.byte()])
    assert (decode_stopped(named), decode_beats(named)) == (63, None)
    assert [decode_stopped(bytes([byte])) for byte in (0, LONGEST, IDLE)] == [None, None, None]
    for stopped, message in ((1, "rank 1 is stopped"), (ENGINE_STOPPED, "the engine process is stopped")):
        with pytest.raises(EngineUnresponsiveError, match=message):
            check_responsive(0.0, stopped)
