"""Waiting for processes that are not this one's children."""

from __future__ import annotations

import time

import psutil


def has_ended(process: psutil.Process, timeout: float = 60.0) -> bool:
    """Whether `process` ends within `timeout` seconds. One that waits for init to take note of its end has ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def has_pid_ended(pid: int) -> bool:
    """As `has_ended`, of the process that has this number, if there still is one."""
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
