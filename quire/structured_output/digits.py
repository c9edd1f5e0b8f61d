"""Rust's regular expressions for numbers between two bounds. llguidance reads bounds as doubles: integers above 2^53
change, -2^63 ends its process."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

MAX_DIGITS = 400
"""Limit of a bound's digits. A double has 309 before its point."""
FRACTION = r"(?:\.[0-9]+)?"
INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}{FRACTION}(?:[eE][+-]?[0-9]+)?"


@dataclass(frozen=True)
class Bound:
    value: Decimal
    is_exclusive: bool = False


def digits_of(value: Decimal) -> tuple[str, str]:
    """(digits before the point, digits after it without trailing zeros) of a JSON number >= 0. Raises ValueError beyond
    MAX_DIGITS."""
    if value.adjusted() >= MAX_DIGITS or (value and value.adjusted() < -MAX_DIGITS):
        raise ValueError(f"it has more than {MAX_DIGITS} digits")
    whole, _, rest = f"{value:f}".partition(".")
    rest = rest.rstrip("0")
    if len(whole) + len(rest) > 2 * MAX_DIGITS:
        raise ValueError(f"it has more than {MAX_DIGITS} digits")
    return whole.lstrip("0") or "0", rest


def exact_number(value: Decimal) -> str:
    whole, rest = digits_of(value.copy_abs())
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}" + (rf"\.{rest}" if rest else "")


def integer_range(low: int | None, high: int | None) -> str | None:
    """Expression for the integers from `low` to `high`; None: there are none."""
    if low is not None and high is not None and low > high:
        return None
    options = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        options.append(f"-(?:{_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        options.append(_naturals(max(low or 0, 0), high))
    return "|".join(options)


def _naturals(low: int, high: int | None) -> str:
    first = _digits(low)
    if high is None:
        longer = f"[1-9][0-9]{{{len(first)},}}"
        return f"{_between(first, '9' * len(first))}|{longer}"
    last = _digits(high)
    if len(first) == len(last):
        return _between(first, last)
    options = [_between(first, "9" * len(first)), _between("1" + "0" * (len(last) - 1), last)]
    if len(last) - len(first) > 1:
        options.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    return "|".join(options)


def _digits(value: int) -> str:
    if value >= 10**MAX_DIGITS:
        raise ValueError(f"it has more than {MAX_DIGITS} digits")
    return str(value)


def _between(low: str, high: str) -> str:
    common = next((index for index, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    prefix, low, high = low[:common], low[common:], high[common:]
    if not low:
        return prefix
    if len(low) == 1:
        return f"{prefix}{_set(low, high)}"
    free = _any(len(low) - 1)
    first, last = int(low[0]), int(high[0])
    options = [low[0] + rest for rest in _at_least(low[1:])] + [high[0] + rest for rest in _at_most(high[1:])]
    if last - first > 1:
        options.append(f"{_set(str(first + 1), str(last - 1))}{free}")
    return f"{prefix}(?:{'|'.join(options)})"


def _at_least(digits: str) -> list[str]:
    found = []
    kept = digits.rstrip("0")
    for index, digit in enumerate(kept):
        if digit != "9":
            found.append(f"{digits[:index]}{_set(str(int(digit) + 1), '9')}{_any(len(digits) - index - 1)}")
    return [*found, kept + _any(len(digits) - len(kept))]


def _at_most(digits: str) -> list[str]:
    found = []
    kept = digits.rstrip("9")
    for index, digit in enumerate(kept):
        if digit != "0":
            found.append(f"{digits[:index]}{_set('0', str(int(digit) - 1))}{_any(len(digits) - index - 1)}")
    return [*found, kept + _any(len(digits) - len(kept))]


def _set(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def number_range(low: Bound | None, high: Bound | None) -> str | None:
    """Regular expression for numbers in a range, without exponents; None: there are none."""
    if low is not None and high is not None and not _has_numbers(low, high):
        return None
    options = []
    zero = Bound(Decimal(0), is_exclusive=True)
    if low is None or low.value < 0:
        least = zero if high is None or high.value >= 0 else Bound(high.value.copy_negate(), high.is_exclusive)
        most = None if low is None else Bound(low.value.copy_negate(), low.is_exclusive)
        options.append(f"-(?:{'|'.join(_positives(least, most))})")
    if high is None or high.value > 0 or (high.value == 0 and not high.is_exclusive):
        options += _positives(low if low is not None and low.value >= 0 else Bound(Decimal(0)), high)
    return "|".join(options)


def _has_numbers(low: Bound, high: Bound) -> bool:
    return low.value < high.value or (low.value == high.value and not (low.is_exclusive or high.is_exclusive))


def _positives(low: Bound, high: Bound | None) -> list[str]:
    whole, rest = digits_of(low.value)
    if high is None:
        return [whole + _fraction_from(rest, low.is_exclusive), *_wholes(int(whole) + 1, None)]
    last, last_rest = digits_of(high.value)
    if whole == last:
        return [whole + _fraction_between(rest, low.is_exclusive, last_rest, high.is_exclusive)]
    found = [whole + _fraction_from(rest, low.is_exclusive)]
    if int(whole) + 1 < int(last):
        found += _wholes(int(whole) + 1, int(last) - 1)
    end = _fraction_to(last_rest, high.is_exclusive)
    return found if end is None else [*found, last + end]


def _wholes(low: int, high: int | None) -> list[str]:
    return [f"(?:{_naturals(low, high)}){FRACTION}"]


def _fraction_from(rest: str, is_exclusive: bool) -> str:
    """Expression for a fraction, with its point, that is not below `rest`."""
    if not rest and not is_exclusive:
        return FRACTION
    return rf"\.(?:{'|'.join(_from(rest, is_exclusive))})"


def _from(rest: str, is_exclusive: bool) -> list[str]:
    found = [f"{rest[:i]}[{int(d) + 1}-9][0-9]*" for i, d in enumerate(rest) if d != "9"]
    return [*found, rest + ("[0-9]*[1-9][0-9]*" if is_exclusive else "[0-9]*")]


def _fraction_to(rest: str, is_exclusive: bool) -> str | None:
    if not rest:
        return None if is_exclusive else r"(?:\.0+)?"
    return rf"(?:\.(?:{'|'.join(each for each in _to(rest, is_exclusive) if each)}))?"


def _to(rest: str, is_exclusive: bool) -> list[str]:
    """Expressions for digits after a point that are not above `rest`, which does not end in zero."""
    found = [f"{rest[:i]}[0-{int(d) - 1}][0-9]*" for i, d in enumerate(rest) if d != "0"]
    if rest or not is_exclusive:
        found += [rest[:i] for i in range(len(rest))]
    return found if is_exclusive else [*found, f"{rest}0*"]


def _fraction_between(low: str, low_exclusive: bool, high: str, high_exclusive: bool) -> str:
    """Expression for a fraction between bounds. low must be below high, or equal to it with both included."""
    if not low and not low_exclusive:
        return _fraction_to(high, high_exclusive) or ""
    if low == high:
        return rf"\.{low}0*"
    size = max(len(low), len(high))
    first, last = low.ljust(size, "0"), high.ljust(size, "0")
    at = next(index for index in range(size) if first[index] != last[index])
    found = [first[: at + 1] + each for each in _from(first[at + 1 :].rstrip("0"), low_exclusive)]
    if int(last[at]) - int(first[at]) > 1:
        found.append(f"{first[:at]}[{int(first[at]) + 1}-{int(last[at]) - 1}][0-9]*")
    found += [last[: at + 1] + each for each in _to(last[at + 1 :].rstrip("0"), high_exclusive)]
    if not low_exclusive and len(low) <= at:
        found += [first[:end] for end in range(max(len(low), 1), at + 1)]
    return rf"\.(?:{'|'.join(found)})"
