"""Routers do what they say."""

from __future__ import annotations

import collections

import msgspec
import pytest

from quire.engine.router import ROUTERS, LeastLoaded, PrefixAware, RoundRobin, beginnings_of, make_router
from quire.errors import UserError
from tests.engine.driving import add


def test_round_robin_goes_around() -> None:
    router = RoundRobin(3)
    assert [router.choose(()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_least_loaded_is_chosen_and_counted() -> None:
    router = LeastLoaded(3)
    router.learn([4, 1, 2])
    assert [router.choose(()) for _ in range(5)] == [1, 2, 1, 2, 1]
    router.learn([9, 9, 0])
    assert [router.choose(()) for _ in range(9)] == [2] * 9


def test_equal_loads_are_taken_in_turn() -> None:
    router = LeastLoaded(4)
    assert [router.choose(()) for _ in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_prefix_stays_with_its_replica_until_that_has_too_much() -> None:
    router = PrefixAware(4)
    homes = {group: router.choose((group,)) for group in "abcdefgh"}
    router.learn([0] * 4)
    assert {group: router.choose((group,)) for group in "abcdefgh"} == homes
    assert len(set(homes.values())) > 1
    loads = [0] * 4
    loads[homes["a"]] = 100
    router.learn(loads)
    assert router.choose("a") != homes["a"]
    router.learn([100] * 4)
    assert router.choose("a") == homes["a"], "all have as much"


def test_a_replica_has_a_quarter_more_than_its_share_and_four_requests_at_most() -> None:
    """Of four that had nothing: a prefix stays at home while k <= 1.25 k / 4 + 4, that is for six requests."""
    router = PrefixAware(4)
    chosen = [router.choose("a") for _ in range(7)]
    assert len(set(chosen[:6])) == 1
    assert chosen[6] != chosen[0]


def test_another_replica_takes_over_its_share_of_the_prefixes_and_moves_no_other() -> None:
    groups = [f"group {number}" for number in range(200)]
    four, five = ({group: PrefixAware(count).choose((group,)) for group in groups} for count in (4, 5))
    shares = collections.Counter(four.values())
    assert min(shares[replica] for replica in range(4)) > 30
    moved = [group for group in groups if five[group] != four[group]]
    assert {five[group] for group in moved} == {4}
    assert 20 < len(moved) < 65


def test_the_longest_beginning_that_a_replica_was_sent_counts_most() -> None:
    """Two conversations with one system prompt: each goes on where it began."""
    router = PrefixAware(2)
    home = router.choose(("system", "first"))
    busy = [0, 0]
    busy[home] = 20
    router.learn(busy)
    assert router.choose(("system", "second")) == 1 - home
    router.learn([0, 0])
    assert router.choose(("system", "first", "first, longer")) == home
    assert router.choose(("system", "second", "second, longer")) == 1 - home
    assert router.choose(("system", "third")) == home
    busy = [0, 0]
    busy[1 - home] = 20
    router.learn(busy)
    assert router.choose(("system", "second")) == home, "it has far more than its share"


def test_a_replica_that_takes_none_is_not_chosen() -> None:
    for name in ROUTERS:
        router = make_router(name, 3)
        chosen = []
        for loads in ([0, None, 0], [None, None, 0], [None, 0, None]):
            router.learn(loads)
            chosen += [router.choose(beginnings) for beginnings in ((), ("a",), ("a", "b"), ("a", "b", "c"))]
        assert set(chosen[:4]) <= {0, 2}
        assert set(chosen[4:8]) == {2}
        assert set(chosen[8:]) == {1}


def test_a_router_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.router.MAX_BEGINNINGS", 10)
    router = PrefixAware(2)
    for number in range(30):
        router.choose(("a", f"{number}", f"{number} longer"))
    assert list(router._sent)[-1] == "29 longer"
    assert len(router._sent) == 10


def test_requests_that_begin_alike_have_equal_names() -> None:
    def names(token_ids: list[int], salt: str = "") -> list[str]:
        message = add("a")
        request = msgspec.structs.replace(message.request, prompt_token_ids=token_ids, cache_salt=salt)
        return beginnings_of(request)

    tokens = list(range(2000))
    assert [len(names(tokens[:length])) for length in (255, 256, 511, 512, 2000)] == [0, 1, 1, 2, 3]
    assert names(tokens)[:2] == names(tokens[:512] + [7] * 512)[:2]
    assert names(tokens)[2] != names(tokens[:512] + [7] * 512)[2]
    assert names(tokens)[0] != names(tokens, "salt")[0]


def test_requests_without_a_prefix_go_to_the_least_loaded() -> None:
    router = PrefixAware(3)
    router.learn([5, 0, 5])
    assert [router.choose(()) for _ in range(3)] == [1, 1, 1]


def test_an_unknown_router_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'least-loaded'"):
        make_router("least-load", 2)
