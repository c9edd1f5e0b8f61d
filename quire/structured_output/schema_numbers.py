"""Numbers of JSON schemas: bounds, multiples and constants, in a form that llguidance follows exactly, or as
`{"$digits": Numbers}` for schema_grammar.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from quire.structured_output.digits import MAX_DIGITS, Bound, exact_number, integer_range, number_range

DIGITS = "$digits"
LARGEST_EXACT = 2**53
MAX_MULTIPLE = 2**32 - 1
MAX_RANGE = 2**13
"""Limit of an expression in characters; one for 64 bits has some 900."""
MAX_MERGED_DIGITS = 20
MAX_MERGED_STEPS = 64
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS = (*BOUNDS, "multipleOf")


class Written(float):
    """A number of a JSON text with a point or an exponent, and its spelling."""

    text: str

    @classmethod
    def of(cls, text: str) -> Written:
        found = cls(text)
        found.text = text
        return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def decimal_of(value: Any) -> Decimal:
    """Exact value. Raises ValueError for other types, and more than MAX_DIGITS digits."""
    if not is_number(value):
        raise ValueError("must be a number")
    if isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise ValueError(f"has more than {MAX_DIGITS} digits")
        return Decimal(value)
    found = Decimal(value.text if isinstance(value, Written) else repr(value))
    digits = found.as_tuple()
    if (found and not -MAX_DIGITS <= found.adjusted() < MAX_DIGITS) or len(digits.digits) > MAX_DIGITS:
        raise ValueError(f"has more than {MAX_DIGITS} digits")
    return found


@dataclass(frozen=True)
class SchemaNumbers:
    low: Bound | None = None
    high: Bound | None = None
    multiple: Fraction | None = None
    is_integer: bool = False

    @classmethod
    def of(cls, schema: dict[str, Any], *, is_integer: bool) -> SchemaNumbers:
        """Read the keywords of a schema. Raises ValueError that begins with the keyword."""
        values = {}
        for name in KEYWORDS:
            value = schema.get(name)
            if value is None or (isinstance(value, bool) and name.startswith("exclusive")):
                continue
            try:
                values[name] = decimal_of(value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        low = _bound(values.get("minimum"), values.get("exclusiveMinimum"), schema.get("exclusiveMinimum") is True, 1)
        high = _bound(values.get("maximum"), values.get("exclusiveMaximum"), schema.get("exclusiveMaximum") is True, -1)
        multiple = None
        if "multipleOf" in values:
            multiple = abs(Fraction(values["multipleOf"]))
            if not multiple:
                raise ValueError("multipleOf must not be 0")
        return cls(low, high, multiple, is_integer)

    def holds(self, value: Any) -> bool:
        """True if a number of a JSON text satisfies the keywords."""
        number = decimal_of(value)
        low, high = self.low, self.high
        if low is not None and (number < low.value or (low.is_exclusive and number == low.value)):
            return False
        if high is not None and (number > high.value or (high.is_exclusive and number == high.value)):
            return False
        if self.is_integer and number != number.to_integral_value():
            return False
        return self.multiple is None or Fraction(number) % self.multiple == 0

    def joined(self, other: SchemaNumbers) -> SchemaNumbers:
        """Keywords that demand both. Raises ValueError for two different multiples."""
        multiples = {each.multiple for each in (self, other)} - {None}
        if len(multiples) > 1:
            raise ValueError("multipleOf is not supported in several schemas beside numbers of more than 53 bits")
        low, high = _narrower(self.low, other.low, 1), _narrower(self.high, other.high, -1)
        return SchemaNumbers(low, high, next(iter(multiples), None), self.is_integer or other.is_integer)

    def expression(self) -> str | None:
        """Expression for the numbers between the bounds; None: there are none."""
        if self.is_integer:
            return integer_range(*self.integer_bounds())
        if self.low is not None and self.low == self.high and not self.low.is_exclusive:
            return exact_number(self.low.value)
        return number_range(self.low, self.high)

    @property
    def num_decimals(self) -> int | None:
        """Limit of decimals, for a multiple of 1, 0.1, 0.01 and so on; None: any number, or another multiple."""
        found = None if self.multiple is None or self.multiple.numerator != 1 else str(self.multiple.denominator)
        return None if found is None or found.rstrip("0") != "1" else len(found) - 1

    def schema(self) -> Any:
        """Schema of numbers alone. Raises ValueError for what cannot be followed."""
        return self._of_integers() if self.is_integer else self._of_numbers()

    def integer_bounds(self) -> tuple[int | None, int | None]:
        return None if self.low is None else _integer(self.low, 1), None if self.high is None else _integer(
            self.high, -1
        )

    def _of_integers(self) -> Any:
        low, high = self.integer_bounds()
        step = 1 if self.multiple is None else self.multiple.numerator
        if low is not None and high is not None and -(-low // step) * step > high:
            return False
        if step > MAX_MULTIPLE:
            raise ValueError(f"multipleOf must not be above {MAX_MULTIPLE}")
        if all(each is None or abs(each) <= LARGEST_EXACT for each in (low, high)):
            found: dict[str, Any] = {"type": "integer"}
            found |= {} if low is None else {"minimum": low}
            found |= {} if high is None else {"maximum": high}
            return found if step == 1 else found | {"multipleOf": step}
        if step != 1:
            raise ValueError("multipleOf is not supported beside bounds of more than 53 bits")
        return self._digits()

    def _of_numbers(self) -> Any:
        low, high = self.low, self.high
        found: dict[str, Any] = {"type": "number"}
        if low is not None and high is not None and not _has_between(low, high):
            return False
        if self.multiple is not None:
            if low is not None and high is not None and not self._has_multiple(low, high, self.multiple):
                return False
            found["multipleOf"] = _multiple(self.multiple)
        if _is_trusted(low, high):
            for bound, name in ((low, "Minimum"), (high, "Maximum")):
                if bound is not None:
                    found[f"exclusive{name}" if bound.is_exclusive else name.lower()] = _plain(bound.value)
            return found
        if self.multiple is not None and self.num_decimals is None:
            raise ValueError("multipleOf is supported beside these bounds only as 1, 0.1, 0.01 and so on")
        return self._digits()

    def _digits(self) -> Any:
        expression = self.expression()
        if expression is not None and len(expression) > MAX_RANGE:
            raise ValueError("the bounds have too many digits to be followed one by one")
        return False if expression is None else {DIGITS: self}

    @staticmethod
    def _has_multiple(low: Bound, high: Bound, step: Fraction) -> bool:
        least = math.ceil(Fraction(low.value) / step) * step
        if low.is_exclusive and least == Fraction(low.value):
            least += step
        return least < Fraction(high.value) or (least == Fraction(high.value) and not high.is_exclusive)


def check_merges(found: list[SchemaNumbers]) -> None:
    """Check number keywords of several schemas for one value, which llguidance joins. Raises ValueError where it could
    be wrong."""
    bounds = {bound for each in found if not each.is_integer for bound in (each.low, each.high) if bound is not None}
    values: dict[int, set[Decimal]] = {}
    for bound in bounds:
        if bound.value.adjusted() < MAX_MERGED_DIGITS:
            values.setdefault(int(bound.value), set()).add(bound.value)
    for bound in bounds:
        if bound.is_exclusive and len(values.get(int(bound.value), ())) > 1:
            raise ValueError(f"the exclusive bound {bound.value} is not supported beside the bounds of other schemas")
    steps = {each.multiple for each in found if each.multiple is not None}
    if len(steps) > MAX_MERGED_STEPS:
        raise ValueError(f"multipleOf is not supported in more than {MAX_MERGED_STEPS} ways beside other schemas")
    scale = math.lcm(*(step.denominator for step in steps))
    whole = [int(step * scale) for step in steps]
    if len(steps) > 1 and math.lcm(*whole) * max(whole) > MAX_MULTIPLE:
        raise ValueError("multipleOf is not supported with as many digits in several schemas")


def _bound(value: Decimal | None, exclusive: Decimal | None, is_exclusive: bool, sign: int) -> Bound | None:
    """Narrower of both bounds; None: neither is given. is_exclusive: draft 4's flag on `value`. sign: 1 for the lower
    bound."""
    found = None if value is None else Bound(value, is_exclusive)
    if exclusive is None:
        return found
    if found is None or (exclusive >= found.value if sign > 0 else exclusive <= found.value):
        return Bound(exclusive, is_exclusive=True)
    return found


def _has_between(low: Bound, high: Bound) -> bool:
    return low.value < high.value or (low.value == high.value and not low.is_exclusive and not high.is_exclusive)


def _narrower(first: Bound | None, second: Bound | None, sign: int) -> Bound | None:
    if first is None or second is None:
        return first or second
    if first.value == second.value:
        return first if first.is_exclusive else second
    return first if (first.value - second.value) * sign > 0 else second


def _integer(bound: Bound, sign: int) -> int:
    found = int(bound.value.to_integral_value(ROUND_CEILING if sign > 0 else ROUND_FLOOR))
    return found + sign if bound.is_exclusive and bound.value == found else found


def _is_trusted(low: Bound | None, high: Bound | None) -> bool:
    for bound in (low, high):
        if (
            bound is not None
            and bound.value
            and not (
                abs(bound.value) < 10**15 and bound.value.adjusted() > -7 and len(bound.value.as_tuple().digits) <= 15
            )
        ):
            return False
    if low is None or high is None or not (low.is_exclusive or high.is_exclusive):
        return True
    return int(low.value) != int(high.value)


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _multiple(step: Fraction) -> int | float:
    """Multiple as llguidance reads it: a double, times ten until it is an integer. Raises ValueError where that is not
    exact."""
    value, exponent = float(step), 0
    plain = value
    while value != int(value) and exponent < 20:
        value *= 10
        exponent += 1
    if value > MAX_MULTIPLE or Fraction(int(value), 10**exponent) != step:
        raise ValueError("multipleOf has digits that cannot be followed exactly")
    return int(plain) if plain == int(plain) else plain


def constant(value: Any) -> Any:
    """Schema of one number, or the number itself if llguidance writes its digits."""
    number = decimal_of(value)
    if not number:
        return 0
    exact = SchemaNumbers(Bound(number), Bound(number), is_integer=isinstance(value, int))
    if isinstance(value, int):
        return value if abs(value) <= LARGEST_EXACT else {DIGITS: exact}
    if abs(number) < LARGEST_EXACT and number.adjusted() > -7 and Decimal(repr(float(value))) == number:
        return float(value)
    return {DIGITS: exact}
