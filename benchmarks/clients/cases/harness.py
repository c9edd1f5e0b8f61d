"""What the cases of every client have in common. It runs in the client's own environment: standard library only."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["QUIRE_URL"]
KEY = os.environ["QUIRE_API_KEY"]
MODEL = os.environ["QUIRE_MODEL"]
OPENAI_URL = URL + "/v1"
BUNDLED = Path(__file__).parents[3] / "quire" / "bundled" / "quire-python-5m"
"""The bundled model, whose tokenizer some tools want."""
MAX_REASON = 500

CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
CITY = '{"city": "Oslo", "people": 7}'
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
"""What the scripted model writes to call the tool by itself."""
WEATHER_CALLS = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
"""What it writes where a call is required."""

WHAT = "What is in the picture?"
RED_SQUARE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAZklEQVR4nO3PUQnAMBQEwciJfz39qZOKSGHzYJYTcLPe4a36wGkA"
    "dQB1AHUAdQB1AHUAdQB1AHVHgGfvXwYAAAAAAAAAAAAAAAAAAAAAMAtwQwB1AHUAdQB1AHUAdQB1AHUAdeMBH0p15nvssORvAAAA"
    "AElFTkSuQmCC"
)
BLUE_SQUARE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAZ0lEQVR4nO3P0QmAMBQEwZRjOfaPP3ZiEQmsD2a5Am7WO7xVH9gN"
    "oA6gDqAOoA6gDqAOoA6gDqBuC3Ddz5EBAAAAAAAAAAAAAAAAAAAAAMwC/CGAOoA6gDqAOoA6gDqAOoA6gLrxgA/ffUCKEKTDDwAA"
    "AABJRU5ErkJggg=="
)
"""Files of PNG in base64. The model `sights` knows what is in them."""

_cases: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function, or a coroutine function, that raises when the client is not served as it should be."""
    _cases.append(function)
    return function


def say(*turns: str) -> str:
    """A text that makes the scripted model say `turns`, one in each of its turns."""
    return f"Please ~~{'||'.join(turns)}~~"


def user(*turns: str) -> list[Any]:
    return [{"role": "user", "content": say(*turns)}]


def equal(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def true(found: object, what: str = "") -> None:
    if not found:
        raise AssertionError(f"{what or 'the value'} is {found!r}")


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> Any:
    """The exception that `call` raises."""
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind} is raised, but {found!r} returned")


def tool(name: str, *arguments: object, **environment: str) -> str:
    """Run a program of the client's environment, and return what it writes. Raises AssertionError when it fails."""
    command = [str(Path(sys.executable).parent / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:]
        raise AssertionError(f"{name} ends with status {done.returncode}: {last}")
    return done.stdout + done.stderr


def main() -> None:
    """Run every case (those named on the command line) and print a line of JSON each."""
    wanted = set(sys.argv[1:])
    for function in _cases:
        name = function.__name__
        if wanted and name not in wanted:
            continue
        reason = None
        try:
            found = function()
            if inspect.isawaitable(found):
                asyncio.run(_wait(found))
        except BaseException as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
        print(json.dumps({"case": name, "reason": reason}), flush=True)


async def _wait(work: Any) -> None:
    await work
