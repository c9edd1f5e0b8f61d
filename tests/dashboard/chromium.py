"""A headless Chromium driven by the DevTools protocol over a pair of pipes: no driver program, no extra package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_SECONDS = 60.0
"""How long the browser may take for one command before the test fails: far beyond what any needs."""


def find_chromium() -> str | None:
    """The browser's program, if this machine has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, or script of the page failed."""


class Chromium:
    """One browser with one tab. `problems` collects what the page's scripts and its security policy complain about,
    `requests` the addresses that the tab has asked for, `data:` left out."""

    def __init__(self, program: str, profile: Path) -> None:
        commands_out, commands_in = _pipe()
        answers_out, answers_in = _pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(profile), "TZ": "UTC"},
        )
        os.close(commands_out)
        os.close(answers_in)
        self._commands, self._answers = commands_in, answers_out
        self._numbers = itertools.count(1)
        self._pending = b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluate until the value is true, and return it. The browser's own clock decides how often it looks."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            # An element is no value that could be handed over.
            value = self.evaluate(f"((found) => found instanceof Node || found)({expression})")
            if value:
                return value
            self.evaluate("new Promise((done) => setTimeout(done, 20))")
        raise AssertionError(f"never true: {expression}; the page says: {self.evaluate('document.body.innerText')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def move_pointer(self, selector: str) -> None:
        """Point at the middle of an element, brought into view first."""
        x, y = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def set_size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def screenshot(self, *, full_page: bool = False) -> bytes:
        """A PNG of the visible part, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """End the browser and everything that it started."""
        os.close(self._commands)
        os.close(self._answers)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)  # it leaves when its pipe is closed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise BrowserError(f"{method}: " + ("the browser is gone" if ready else "no answer"))
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    self.problems.append(f"{entry['text']} ({entry.get('url', '')})")
            case "Page.javascriptDialogOpening" | "Page.windowOpen":
                self.problems.append(str(event["params"]))
            case "Network.requestWillBeSent":
                url: str = event["params"]["request"]["url"]
                if not url.startswith("data:"):
                    self.requests.append(url)
            case "Runtime.consoleAPICalled":
                if event["params"]["type"] in ("error", "warning", "assert"):
                    self.problems.append(str(event["params"]["args"]))


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Chromium]:
    """A browser with a profile of its own, ended at the end of the block."""
    chromium = Chromium(program, profile)
    try:
        yield chromium
    finally:
        chromium.close()


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors stay clear of those that the browser uses."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
