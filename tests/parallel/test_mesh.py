"""Ranks and their groups."""

from __future__ import annotations

import itertools

import pytest

from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError
from quire.parallel.mesh import KINDS, Mesh, Place

SIZES = [
    ParallelConfig(tp, pp, dp, ep, dcp)
    for tp, pp, dp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4))
    for ep in (1, tp, tp * dp)
    for dcp in sorted({1, tp})
] + [ParallelConfig(2, 2, 2, pcp=3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_is_in_one_group_of_each_kind(sizes: ParallelConfig) -> None:
    mesh = Mesh(sizes)
    for kind in KINDS:
        groups = mesh.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
        assert all(len(group) == getattr(sizes, kind) for group in groups)
        assert all(list(group) == sorted(group) for group in groups)
        assert all(rank in mesh.group_of(rank, kind) for rank in range(mesh.num_ranks))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_and_places(sizes: ParallelConfig) -> None:
    mesh = Mesh(sizes)
    places = [mesh.place(rank) for rank in range(mesh.num_ranks)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.num_ranks))
    assert len(set(places)) == mesh.num_ranks == sizes.tp * sizes.pp * sizes.dp * sizes.pcp


def test_order() -> None:
    """tensor, prompts, pipeline, data: the first is the fastest. Ranks that share tokens are neighbours among the
    first."""
    mesh = Mesh(ParallelConfig(tp=4, pp=2, dp=2, dcp=2))
    assert mesh.groups("tp")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dcp")[:3] == ((0, 1), (2, 3), (4, 5))
    assert mesh.groups("pp")[:2] == ((0, 4), (1, 5))
    assert mesh.groups("dp")[:2] == ((0, 8), (1, 9))
    assert mesh.place(13) == Place(dp=1, pp=1, tp=1)
    mesh = Mesh(ParallelConfig(tp=2, pp=2, pcp=2))
    assert mesh.groups("tp")[:2] == ((0, 1), (2, 3))
    assert mesh.groups("pcp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert mesh.groups("pp")[0] == (0, 4)
    assert mesh.place(3) == Place(dp=0, pp=0, tp=1, pcp=1)


def test_ranks_that_share_tokens_are_no_more_devices() -> None:
    assert ParallelConfig(tp=4, dcp=2).num_devices == 4
    with pytest.raises(ConfigError, match="decode_context_parallel_size=3 must divide tensor_parallel_size=4"):
        ParallelConfig(tp=4, dcp=3)


def test_a_group_of_experts_takes_the_ranks_of_neighbouring_replicas() -> None:
    assert Mesh(ParallelConfig(tp=2, dp=4, ep=4)).groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Mesh(ParallelConfig(tp=2, pp=2, dp=2, ep=4)).groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "ep", "dcp", "pcp", "interleave"])
def test_sizes_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0") as caught:
        ParallelConfig(**{name: 0})
    assert caught.value.param == name


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2, "ep": 3}, {"tp": 2, "dp": 3, "ep": 4}])
def test_experts_are_spread_over_whole_replicas(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"ep=\d must be a multiple of tp=2"):
        ParallelConfig(**sizes)
