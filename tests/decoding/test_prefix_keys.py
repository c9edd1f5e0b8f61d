"""Which blocks of the prefix cache requests share that differ in values of step columns."""

from __future__ import annotations

from typing import Any

import pytest

from quire.decoding.sequence import Request
from quire.kv_cache.block_hash import HashChain
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.step import TokenValues

TOKENS = list(range(20))


def chain(**columns: Any) -> HashChain:
    source = EngineRequest(
        request_id="a", prompt_token_ids=TOKENS, params=SamplingParams(), max_tokens=1, seed=0, **columns
    )
    made = HashChain(4, "", Request(source, 0.0).extra_keys(4))
    made.extend(TOKENS, 5)
    return made


LISTED = {"rotary_positions": TokenValues(5, [5, 5, 5, 5, 5]), "rotary_heights": TokenValues(5, [5, 9, 9, 9, 9])}
OTHER = {**LISTED, "rotary_heights": TokenValues(5, [5, 9, 9, 9, 8])}


@pytest.mark.parametrize(
    ("first", "second", "num_shared"),
    [
        ({}, {}, 5),
        ({"columns": {"segments": 3}}, {}, 0),
        ({"columns": {"segments": 3}}, {"columns": {"segments": 4}}, 0),
        ({"columns": {"segments": 3}}, {"columns": {"segments": 3}}, 5),
        ({"token_columns": LISTED}, {"token_columns": dict(reversed(LISTED.items()))}, 5),
        ({"token_columns": LISTED}, {"token_columns": OTHER}, 2),
        ({"token_columns": LISTED, "columns": {"rotary_positions": -4}}, {}, 1),
        ({"token_columns": LISTED}, {"token_columns": {"rotary_positions": LISTED["rotary_heights"]}}, 1),
        (
            {"token_columns": LISTED, "columns": {"rotary_heights": -3}},
            {"token_columns": LISTED, "columns": {"rotary_heights": -4}},
            2,
        ),
    ],
)
def test_blocks_are_shared_up_to_the_first_value_that_differs(first: Any, second: Any, num_shared: int) -> None:
    assert chain(**first).num_shared(chain(**second)) == num_shared
