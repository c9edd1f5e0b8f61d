"""When requests arrive: an open-loop process, drawn in full before the run so that the server cannot influence it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from quire.errors import UserError


def arrival_offsets(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start of the run at which each request is due; ascending, the first at 0.

    rate: requests per second, `math.inf` for all at once. burstiness: shape of the gamma distribution of the gaps;
    1 is a Poisson process, below 1 burstier, above 1 more even. Raises UserError for non-positive values.
    """
    if not rate > 0:
        raise UserError(f"--request-rate must be positive or inf, not {rate:g}", param="request_rate")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UserError(f"--burstiness must be a positive number, not {burstiness:g}", param="burstiness")
    if math.isinf(rate):
        return [0.0] * num_requests
    return list(_accumulate(num_requests, rate, burstiness, rng))


def _accumulate(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma gaps of mean 1/rate: shape k and scale 1/(rate k)."""
    offset = 0.0
    for index in range(num_requests):
        if index:
            offset += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield offset
