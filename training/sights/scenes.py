"""Rendered pictures of a few things, and questions about them with their answers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 180),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
HELD_OUT = frozenset(
    {("red", "star"), ("green", "cross"), ("blue", "triangle"), ("yellow", "circle"), ("purple", "square")}
)
"""Pairs of colour and shape that no picture of the training has."""
NUMBERS = ("zero", "one", "two", "three", "four")
PLACES = {"left": (0.28, 0.5), "right": (0.72, 0.5), "top": (0.5, 0.28), "bottom": (0.5, 0.72)}
PLACE_TEXTS = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
SIZES = ((64, 64), (80, 48), (48, 80))
"""Widths and heights of the pictures."""
_SCALE = 3
"""Pictures are drawn larger by this and made smaller, which smooths edges."""


@dataclass(frozen=True)
class Thing:
    colour: str
    shape: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.colour, self.shape

    def named(self) -> str:
        article = "an" if self.colour == "orange" else "a"
        return f"{article} {self.colour} {self.shape}"


@dataclass
class Scene:
    """kind: "one", "two", "many", "digit" or "nothing"."""

    kind: str
    picture: Image.Image
    things: list[Thing] = field(default_factory=list)
    place: str = ""
    is_stacked: bool = False
    number: int = 1
    digit: int = 0
    colour: str = ""

    def description(self) -> str:
        """What is in the picture."""
        if self.kind == "nothing":
            return "Nothing."
        if self.kind == "digit":
            return f"The digit {self.digit} in {self.colour}."
        if self.kind == "many":
            return f"{NUMBERS[self.number].capitalize()} {self.things[0].colour} {_plural(self.things[0].shape)}."
        return " and ".join(thing.named() for thing in self.things).capitalize() + "."

    def questions(self) -> list[tuple[str, str]]:
        """Pairs of a question and its answer, of each kind that the scene has."""
        found = [("what", self.description())]
        if self.kind == "one":
            thing = self.things[0]
            found += [("colour", f"{thing.colour.capitalize()}."), ("shape", f"A {thing.shape}."), ("number", "One.")]
            if self.place:
                found.append(("where", f"{PLACE_TEXTS[self.place].capitalize()}."))
        if self.kind == "two":
            names = ("top", "bottom") if self.is_stacked else ("left", "right")
            found.append(("number", "Two."))
            for name, thing in zip(names, self.things, strict=True):
                found.append((f"at {name}", f"{thing.named().capitalize()}."))
            first, second = self.things
            if first.shape != second.shape:
                for name, thing in zip(names, self.things, strict=True):
                    found.append((f"where {thing.shape}", f"{PLACE_TEXTS[name].capitalize()}."))
                    found.append((f"colour {thing.shape}", f"{thing.colour.capitalize()}."))
        if self.kind == "many":
            thing = self.things[0]
            found += [("number", f"{NUMBERS[self.number].capitalize()}."), ("colour", f"{thing.colour.capitalize()}.")]
        if self.kind == "digit":
            found += [("digit", f"{self.digit}."), ("colour", f"{self.colour.capitalize()}.")]
        if self.kind == "nothing":
            found.append(("number", "Zero."))
        return found


QUESTIONS = {
    "what": ("What is in the picture?", "What is this?", "What do you see?", "Describe the image."),
    "colour": ("Which colour is it?", "What color is it?"),
    "shape": ("Which shape is it?", "What shape is it?"),
    "number": ("How many things are there?", "How many?"),
    "where": ("Where is it?",),
    "digit": ("Which digit is it?", "What digit is it?"),
}


def question(kind: str, rng: random.Random) -> str:
    """A question of a kind, in one of its forms."""
    word, _, rest = kind.partition(" ")
    if word == "at":
        return f"What is {PLACE_TEXTS[rest]}?"
    if rest:
        return f"Where is the {rest}?" if word == "where" else f"Which colour is the {rest}?"
    return rng.choice(QUESTIONS[kind])


def scene(rng: random.Random, kind: str, size: tuple[int, int] = (64, 64), *, held_out: bool = False) -> Scene:
    """A scene of a kind. held_out: its pairs of colour and shape are those of HELD_OUT; else none of them is."""
    width, height = (_SCALE * side for side in size)
    shade = rng.randint(150, 255)
    picture = Image.new("RGB", (width, height), tuple(min(255, max(0, shade + rng.randint(-12, 12))) for _ in range(3)))
    draw = ImageDraw.Draw(picture)
    found = Scene(kind, picture)
    if kind == "one":
        thing = _thing(rng, held_out)
        found.things = [thing]
        found.place = rng.choice((*PLACES, ""))
        x, y = PLACES.get(found.place, (0.5, 0.5))
        radius = rng.uniform(0.14, 0.24) if found.place else rng.uniform(0.2, 0.36)
        _put(draw, rng, thing, x * width, y * height, radius * min(width, height))
    elif kind == "two":
        found.things = [_thing(rng, held_out) for _ in range(2)]
        found.is_stacked = width < height or (width == height and rng.random() < 0.5)
        places = ("top", "bottom") if found.is_stacked else ("left", "right")
        for name, thing in zip(places, found.things, strict=True):
            x, y = PLACES[name]
            _put(draw, rng, thing, x * width, y * height, rng.uniform(0.15, 0.21) * min(width, height))
    elif kind == "many":
        found.number = rng.randint(2, 4)
        thing = _thing(rng, held_out)
        found.things = [thing]
        corners = rng.sample([(0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)], found.number)
        for x, y in corners:
            _put(draw, rng, thing, x * width, y * height, rng.uniform(0.13, 0.18) * min(width, height))
    elif kind == "digit":
        found.digit, found.colour = rng.randint(0, 9), rng.choice(list(COLOURS))
        font = ImageFont.load_default(rng.uniform(0.6, 0.95) * min(width, height))
        place = (width * rng.uniform(0.44, 0.56), height * rng.uniform(0.46, 0.54))
        draw.text(place, str(found.digit), _shaded(rng, found.colour), font, anchor="mm")
    found.picture = picture.resize(size, Image.Resampling.LANCZOS)
    return found


def _thing(rng: random.Random, held_out: bool) -> Thing:
    while True:
        pair = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if (pair in HELD_OUT) == held_out:
            return Thing(*pair)


def _shaded(rng: random.Random, colour: str) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + rng.randint(-12, 12))) for value in COLOURS[colour])


def _put(draw: ImageDraw.ImageDraw, rng: random.Random, thing: Thing, x: float, y: float, radius: float) -> None:
    """Draw a thing around a place, moved and turned a little."""
    x += rng.uniform(-0.2, 0.2) * radius
    y += rng.uniform(-0.2, 0.2) * radius
    turn = rng.uniform(-0.15, 0.15)
    colour = _shaded(rng, thing.colour)

    def points(angles: list[float], radii: list[float]) -> list[tuple[float, float]]:
        return [
            (x + far * radius * math.sin(angle + turn), y - far * radius * math.cos(angle + turn))
            for angle, far in zip(angles, radii, strict=True)
        ]

    if thing.shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif thing.shape == "square":
        draw.polygon(points([math.pi / 4 + math.pi / 2 * n for n in range(4)], [1.2] * 4), fill=colour)
    elif thing.shape == "triangle":
        draw.polygon(points([math.tau / 3 * n for n in range(3)], [1.2] * 3), fill=colour)
    elif thing.shape == "star":
        draw.polygon(points([math.tau / 10 * n for n in range(10)], [1.3, 0.5] * 5), fill=colour)
    else:
        arm = 0.32
        corners = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)]
        corners += [(arm, 1), (-arm, 1), (-arm, arm), (-1, arm), (-1, -arm), (-arm, -arm)]
        angles = [math.atan2(right, -down) for right, down in corners]
        draw.polygon(points(angles, [1.1 * math.hypot(*corner) for corner in corners]), fill=colour)


def _plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")
