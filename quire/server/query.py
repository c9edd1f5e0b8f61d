"""Query parameters. A route takes those of its function, as text; any other is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from quire.errors import UserError
from quire.server.errors import invalid_request
from quire.server.fields import near_miss

NO_EFFECT = frozenset({"api-version", "beta"})
"""Parameters that clients of Azure and Anthropic append to every URL."""
_MARK = "query_parameters"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def takes_query(*names: str) -> Callable[[Endpoint], Endpoint]:
    """Decorator: mark an endpoint that reads these parameters from the request."""

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _MARK, frozenset(names))
        return endpoint

    return mark


async def check_query(request: Request) -> None:
    """Dependency of all routes: raises ApiError (400) for an unknown query parameter."""
    if not request.scope["query_string"]:
        return
    known: frozenset[str] = getattr(request.scope["endpoint"], _MARK, frozenset())
    known |= {field.alias for field in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known and name not in NO_EFFECT:
            meant = near_miss(name, known)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise invalid_request(f"unknown query parameter {name!r}{hint}", param=name, code="unknown_parameter")


def truth(name: str, text: str) -> bool:
    """Parse a boolean parameter. Raises UserError."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise UserError(f"{name} must be true or false, not {text!r}", param=name)
    return values[text.lower()]


def whole_number(name: str, text: str, low: int, high: int = 2**31 - 1) -> int:
    """Parse an integer parameter. Raises UserError."""
    if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise UserError(f"{name} must be a whole number from {low} to {high}, not {text!r}", param=name)
    return int(text)
