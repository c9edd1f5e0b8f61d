"""Ask a server about rendered pictures whose pairs of colour and shape no picture of the training had.

Counts the right answers for one thing and for two, of other kinds of scenes, with the picture of another question, and
with a grey one. A server is started with `quire serve DIRECTORY`."""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image
from scenes import Scene, question, scene

NUM_SCENES = 500
SEED = 20_000
"""Far from the seeds of the training."""


def ask(url: str, picture: Image.Image, text: str) -> str:
    """The answer of the server's chat about a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": address}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 30}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def right(url: str, cases: list[tuple[Image.Image, str, str]]) -> float:
    """The share of cases (picture, question, answer) with that answer."""
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda case: ask(url, case[0], case[1]), cases))
    return sum(answer == case[2] for answer, case in zip(answers, cases, strict=True)) / len(cases)


def cases_of(kind: str, *, held_out: bool, number: int = NUM_SCENES) -> list[tuple[Scene, str, str]]:
    """Scenes of a kind, each with one of its questions and the answer."""
    rng = random.Random(SEED)
    found = []
    for _ in range(number):
        shown = scene(rng, kind, held_out=held_out)
        asked, answer = rng.choice(shown.questions())
        found.append((shown, question(asked, rng), answer))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    arguments = parser.parse_args()

    def report(name: str, cases: list[tuple[Scene, str, str]], shown: Callable[[int], Image.Image]) -> None:
        given = [(shown(index), text, answer) for index, (_, text, answer) in enumerate(cases)]
        print(f"{name}: {right(arguments.url, given):.1%} of {len(given)}", flush=True)

    for kind in ("one", "two"):
        cases = cases_of(kind, held_out=True)
        report(f"{kind}, pairs never seen", cases, lambda index, cases=cases: cases[index][0].picture)
    for kind in ("one", "two", "many", "digit"):
        cases = cases_of(kind, held_out=False, number=200)
        report(f"{kind}, other renders", cases, lambda index, cases=cases: cases[index][0].picture)
    ones = cases_of("one", held_out=True)
    whats = [(shown, "What is in the picture?", shown.description()) for shown, _, _ in ones]
    moved = [whats[-1], *whats[:-1]]
    report("another's picture, what that one shows", moved, lambda index: whats[index - 1][0].picture)
    report("another's picture, what the first one shows", whats, lambda index: whats[index - 1][0].picture)
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    report("a grey picture", whats, lambda index: grey)


if __name__ == "__main__":
    main()
