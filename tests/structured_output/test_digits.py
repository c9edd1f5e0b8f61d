"""Ranges of numbers, digit by digit, against arithmetic."""

from __future__ import annotations

import random
import re
from decimal import Decimal

import pytest

from quire.errors import UserError
from quire.structured_output.digits import Bound, exact_number, integer_range, number_range
from tests.structured_output.bytes_matcher import schema_matcher, takes

LEAST, MOST = -(2**63), 2**63 - 1


def random_integer(rng: random.Random) -> int:
    return rng.choice([rng.randint(-12, 12), rng.randint(-1500, 1500), rng.randint(-(10**24), 10**24)])


def random_decimal(rng: random.Random) -> Decimal:
    return Decimal(rng.choice([rng.randint(-30, 30), rng.randint(-40000, 40000)])).scaleb(-rng.randint(0, 4))


def test_integers() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        low, high = (None if rng.random() < 0.2 else random_integer(rng) for _ in range(2))
        expression = integer_range(low, high)
        values = [random_integer(rng) for _ in range(4)]
        values += [bound + step for bound in (low, high) if bound is not None for step in (-1, 0, 1)]
        for value in values:
            holds = (low is None or value >= low) and (high is None or value <= high)
            is_taken = expression is not None and re.fullmatch(expression, str(value)) is not None
            assert is_taken == holds, (low, high, value)


def test_numbers() -> None:
    steps = [Decimal(text) for text in ("0", "0.0001", "-0.0001", "0.1", "-0.00001")]
    for seed in range(2000):
        rng = random.Random(seed)
        low, high = (None if rng.random() < 0.2 else Bound(random_decimal(rng), rng.random() < 0.5) for _ in range(2))
        expression = number_range(low, high)
        values = [random_decimal(rng) for _ in range(4)]
        values += [bound.value + step for bound in (low, high) if bound is not None for step in steps]
        for value in values:
            holds = low is None or value > low.value or (value == low.value and not low.is_exclusive)
            holds &= high is None or value < high.value or (value == high.value and not high.is_exclusive)
            for text in {f"{value:f}", f"{value.normalize():f}"}:
                text = text.removeprefix("-") if value == 0 else text
                is_taken = expression is not None and re.fullmatch(expression, text) is not None
                assert is_taken == holds, (low, high, text)


def test_constants() -> None:
    assert exact_number(Decimal("-12.50")) == r"-12\.5"
    assert exact_number(Decimal("1e3")) == "1000"


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"type": "integer", "minimum": LEAST, "maximum": MOST}, [LEAST, MOST, 0, -1], [LEAST - 1, MOST + 1]),
        ({"type": "integer", "minimum": LEAST}, [LEAST, 10**30], [LEAST - 1]),
        ({"type": "integer", "exclusiveMaximum": 2**64}, [2**64 - 1, -5], [2**64]),
        ({"type": "number", "minimum": -1e308, "maximum": 1e308}, [0.5, -12, 10**300], [10**308 + 1]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5], [0, 0.51]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, [1.2], [1, 1.6]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.1], ["-0", 0]),
        ({"minimum": 2**60}, [2**60, '"x"', "null", "[1]", "{}"], [2**60 - 1]),
        ({"type": ["integer", "null"], "maximum": 2**60}, [5, "null"], [2**60 + 1, 0.5]),
        ({"type": "integer", "multipleOf": 0.5}, [3], [2.5]),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 3, "multipleOf": 2}, [2], [1, 3, 4]),
        ({"minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"type": "number", "multipleOf": 0.01}, [0.07, 4.3, -1], [0.001]),
    ],
)
def test_bounds_of_schemas(schema: dict[str, object], taken: list[object], not_taken: list[object]) -> None:
    found = schema_matcher(schema)
    assert all(takes(found, str(value)) for value in taken)
    assert not any(takes(found, str(value)) for value in not_taken)


@pytest.mark.parametrize(
    "value", [2**53 + 1, -(2**63), 2**64 - 1, [2**60, {"a": -(2**63)}], 10**30, 0.1, -0.0, 1.0, 1e22, {"b": [2**60]}]
)
def test_constants_are_written_digit_by_digit(value: object) -> None:
    import json

    text = json.dumps(value, separators=(",", ":")).replace("-0.0", "0").replace("1.0", "1")
    text = text.replace("1e+22", "1" + 22 * "0")
    for schema in (
        {"const": value},
        {"enum": ["x", value]},
        {"properties": {"k": {"const": value}}, "required": ["k"]},
    ):
        whole = f'{{"k":{text}}}' if "properties" in schema else text
        found = schema_matcher(schema | ({"type": "object"} if "properties" in schema else {}))
        assert takes(found, whole)
        assert not takes(found, whole.replace("1", "2").replace("9", "8").replace("0", "3"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "multipleOf": 0}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.07}, "multipleOf"),
        ({"type": "integer", "multipleOf": 2**40}, "multipleOf"),
        ({"type": "integer", "minimum": "3"}, "minimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no text"),
        ({"type": "number", "minimum": 0.1, "maximum": 0.2, "multipleOf": 0.5}, "no text"),
        ({"type": "number", "maximum": int("9" * 500)}, "digits"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]}, "exclusive"),
        ({"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf"),
    ],
)
def test_what_is_refused(schema: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        schema_matcher(schema)
