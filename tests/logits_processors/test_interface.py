"""What an operator and a request may name, and the states that processors keep by row."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError, UserError
from quire.logits_processors import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    check_params,
    load_processors,
    name_of,
    process_dict_updates,
)
from quire.sampling_params import SamplingParams
from tests.logits_processors.samples import Counting, Target

SWAP, ONE_WAY = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL


def test_states_follow_their_rows() -> None:
    params = SamplingParams()
    states = {0: "a", 1: "b", 2: "c", 3: "d"}

    def new_state(_: SamplingParams, prompt: list[int] | None, output: list[int]) -> str | None:
        return "new" if prompt else None

    assert not process_dict_updates(states, None, new_state)
    update = BatchUpdate(3, [1], [(0, params, [7], []), (2, params, [], [])], [(3, 1, ONE_WAY)])
    assert process_dict_updates(states, update, new_state)
    assert states == {0: "new", 1: "d"}
    process_dict_updates(states, BatchUpdate(3, [], [], [(1, 0, SWAP)]), new_state)
    assert states == {0: "d", 1: "new"}
    process_dict_updates(states, BatchUpdate(3, [], [], [(2, 0, SWAP)]), new_state)
    assert states == {1: "new", 2: "d"}


def test_classes_are_named_so_that_every_process_finds_them() -> None:
    name = "tests.logits_processors.samples:Target"
    assert name_of(Target) == name_of(name) == name
    assert load_processors([name]) == [Target]

    class Local(Counting):
        pass

    for value in (Local, 5):
        with pytest.raises(ConfigError, match="classes that a module defines"):
            name_of(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.logits_processors.samples", "it must be 'module:Class'"),
        ("tests.logits_processors.nowhere:Target", "No module named"),
        ("tests.logits_processors.samples:Nothing", "has no attribute 'Nothing'"),
        ("quire.sampling_params:SamplingParams", "it must be a subclass of LogitsProcessor"),
        ("quire.logits_processors:LogitsProcessor", "it lacks __init__, apply, is_argmax_invariant, update_state"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        load_processors([name])
    assert found.value.param == "logits_processors"
    assert name in str(found.value)


@pytest.mark.parametrize(
    ("fields", "classes", "message"),
    [
        ({"extra_args": {"a": 1}}, [], "this engine has loaded none"),
        ({"extra_args": {"target_token": "x"}}, [Target], "target_token value x is not int"),
        ({"extra_args": {"target_token": 1, "f": object()}}, [Target], "must be plain values"),
        ({"extra_args": {"target_token": 1}, "use_beam_search": True, "n": 2}, [Target], "that Target concerns"),
    ],
)
def test_what_no_request_may_have(fields: dict[str, Any], classes: list[type[LogitsProcessor]], message: str) -> None:
    params = SamplingParams(temperature=0, **fields)
    with pytest.raises(UserError, match=message):
        check_params(classes, params)


def test_a_request_that_no_processor_concerns_is_as_ever() -> None:
    assert not check_params([Target], SamplingParams(n=2, use_beam_search=True, temperature=0))
    assert check_params([Target], SamplingParams(extra_args={"target_token": 1}))
    assert check_params([Counting], SamplingParams())
