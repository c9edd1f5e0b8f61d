"""Jitter: what is drawn has the given distribution, a fit finds it again, and without any nothing changes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from quire.errors import UserError
from quire.simulator import jitter_fit
from quire.simulator.fleet import ReplicaSpec, simulate_fleet
from quire.simulator.hardware import find, profiles, read_profile, to_json
from quire.simulator.jitter import DrawnScatter, Jitter, NoScatter, make_scatter
from quire.simulator.jitter_fit import fit_jitter
from quire.simulator.replica import EngineSettings
from quire.simulator.workloads import Arrivals, stream
from tests.simulator.making import make_cost, records, settings

JITTER = Jitter(
    single=((0.1, 0.8), (0.5, 0.95), (0.9, 1.05), (0.99, 1.4), (1.0, 1.8)),
    chunks=((0.5, 0.9), (1.0, 1.1)),
    lasting=((0.1, 0.3), (1.0, 0.4)),
)
STEP = 0.01


def drawn(jitter: Jitter, count: int, *, seed: int = 0, has_chunks: bool = False) -> list[float]:
    scatter = DrawnScatter(jitter, seed)
    return [scatter.seconds(number * STEP, 1.0, has_chunks) for number in range(count)]


def test_ratios_have_the_distribution_of_their_kind() -> None:
    ratios = drawn(replace(JITTER, lasting=((0.1, 0.3),)), 60_000)
    for level, ratio in JITTER.single:
        assert sum(each <= ratio for each in ratios) / len(ratios) == pytest.approx(level, abs=0.01)
    assert set(drawn(JITTER, 200, has_chunks=True)) == {0.9, 1.1}


def test_what_lasts_is_still_there_at_the_next_step() -> None:
    """The correlation of two steps is the share that lasts times what time leaves of it."""
    jitter = Jitter(single=((0.5, 1.0), (1.0, 3.0)), lasting=((1.0, 0.8),))
    ratios = np.array(drawn(jitter, 100_000)) - 2.0
    for distance in (1, 50, 300):
        correlation = 0.8 * math.exp(-distance * STEP)
        same_side = 2 / math.pi * math.asin(correlation)
        assert float((ratios[distance:] * ratios[:-distance]).mean()) == pytest.approx(same_side, abs=0.06)


def test_a_fit_finds_what_was_drawn() -> None:
    rng = random.Random(1)
    scatter, now, ratios, begins, kinds = DrawnScatter(JITTER, 5), 0.0, [], [], []
    for _ in range(60_000):
        kinds.append(rng.random() < 0.1)
        begins.append(now)
        ratios.append(scatter.seconds(now, 1.0, kinds[-1]))
        now += STEP * rng.uniform(0.5, 1.5)
    found = fit_jitter(np.array(ratios), np.ones(len(ratios)), np.array(begins), np.array(kinds))
    for table, true in ((found.single, JITTER.single), (found.chunks, JITTER.chunks)):
        for level in (0.05, 0.3, 0.7, 0.95, 0.995):
            assert _at(table, level) == pytest.approx(_at(true, level), rel=0.02), level
    assert sum(ratio * width for ratio, width in _widths(found.single)) == pytest.approx(
        fmean(ratio for ratio, is_chunk in zip(ratios, kinds, strict=True) if not is_chunk)
    )
    shares = dict(found.lasting)
    assert 0.4 < sum(shares.values()) < 0.75
    assert shares.get(0.1, 0.0) + shares.get(1.0, 0.0) > 0.8 * sum(shares.values())
    assert found.stalls == ()


def test_a_smooth_distribution_and_its_shares() -> None:
    """Log-normal ratios of a process with two times: shares come back."""
    rng, slow, ratios = np.random.default_rng(2), 0.0, []
    kept = math.exp(-STEP / 1.0)
    for _ in range(150_000):
        slow = kept * slow + math.sqrt(1 - kept**2) * rng.standard_normal()
        ratios.append(math.exp(0.2 * (math.sqrt(0.6) * slow + math.sqrt(0.4) * rng.standard_normal())))
    begins = np.arange(len(ratios)) * STEP
    found = fit_jitter(np.array(ratios), np.ones(len(ratios)), begins, np.zeros(len(ratios), dtype=bool))
    assert found.chunks == ()
    assert dict(found.lasting)[1.0] == pytest.approx(0.6, abs=0.12)
    assert sum(share for _, share in found.lasting) == pytest.approx(0.6, abs=0.06)
    assert _at(found.single, 0.97) == pytest.approx(math.exp(0.2 * 1.88), rel=0.04)


def test_shares_are_never_more_than_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept with four digits; these, rounded, would be 1.0001."""
    monkeypatch.setattr(jitter_fit, "not_negative", lambda *_: np.array([0.30006, 0.0, 0.30006, 0.39988]))
    ratios, begins = 1 + 0.1 * np.sin(np.arange(200)), np.arange(200) * STEP
    found = fit_jitter(ratios, np.ones(200), begins, np.zeros(200, dtype=bool))
    assert found.lasting == ((0.01, 0.3), (1.0, 0.3), (10.0, 0.3998))


STALLS = ((0.05, 0.5), (0.2, 0.1))


def test_stalls_come_so_often_in_a_second_of_work_and_last_as_long_in_any_step() -> None:
    for expected in (0.01, 0.1):
        scatter, count = DrawnScatter(Jitter(stalls=STALLS), 0), int(2_000 / expected)
        late = [round(scatter.seconds(0.0, expected, False) - expected, 9) for _ in range(count)]
        for seconds, rate in STALLS:
            assert late.count(seconds) == pytest.approx(rate * 2_000, rel=0.2)


def test_a_fit_tells_stalls_from_scatter() -> None:
    """Stalls neither widen the distribution of the rest nor count as something that lasts."""
    scatter = DrawnScatter(Jitter(single=((0.5, 0.9), (1.0, 1.1)), stalls=STALLS), 0)
    measured = np.array([scatter.seconds(0.0, STEP, False) for _ in range(60_000)])
    begins, kinds = np.arange(len(measured)) * STEP, np.zeros(len(measured), dtype=bool)
    found = fit_jitter(measured, np.full(len(measured), STEP), begins, kinds)
    assert sum(rate for _, rate in found.stalls) == pytest.approx(0.6, rel=0.15)
    assert sum(seconds * rate for seconds, rate in found.stalls) == pytest.approx(0.045, rel=0.15)
    assert found.single[-1][1] == pytest.approx(1.1)
    assert sum(share for _, share in found.lasting) < 0.05


def test_few_steps_have_few_levels() -> None:
    begins, kinds = np.arange(45) * STEP, np.zeros(45, dtype=bool)
    found = fit_jitter(np.linspace(1.0, 1.44, 45), np.ones(45), begins, kinds)
    assert 2 <= len(found.single) <= 4
    assert found.single[-1][0] == 1
    assert fit_jitter(np.ones(5), np.ones(5), begins[:5], kinds[:5]) == Jitter()


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    cost = make_cost(replace(find("a100-40g"), jitter=JITTER))

    def run(seed: int) -> list[float]:
        requests = stream("alpaca", Arrivals(50.0, num_requests=60))
        return [record.finish for record in records(requests, cost, settings(seed=seed))]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_without_jitter_a_seed_changes_nothing() -> None:
    cost = make_cost()

    def run(options: EngineSettings) -> list[float]:
        return [each.finish for each in records(stream("alpaca", Arrivals(50.0, num_requests=60)), cost, options)]

    assert run(settings(seed=1)) == run(settings(seed=2))
    assert all(not profile.jitter for profile in profiles().values() if profile.kind == "gpu")
    assert isinstance(make_scatter(Jitter(), 0), NoScatter)
    assert make_scatter(Jitter(), 0).seconds(1.0, 0.3, True) == 0.3


def test_replicas_have_jitter_of_their_own_in_any_number_of_processes() -> None:
    spec = ReplicaSpec(make_cost(replace(find("a100-40g"), jitter=JITTER)), settings())
    requests = list(stream("alpaca", Arrivals(100.0, num_requests=40)))
    both = [each for each in requests for _ in range(2)]  # round-robin: each replica gets the same ones
    alone = simulate_fleet(both, spec, 2)
    assert alone[0].end != alone[1].end
    assert [each.end for each in simulate_fleet(both, spec, 2, num_processes=2)] == [each.end for each in alone]


def test_a_profile_keeps_its_jitter(tmp_path: Path) -> None:
    path = tmp_path / "noisy.json"
    noisy = replace(find("cpu-2-core-avx512"), name="noisy", jitter=JITTER)
    path.write_text(json.dumps(to_json(noisy)))
    assert read_profile(path) == noisy
    assert "jitter" not in to_json(replace(noisy, jitter=Jitter()))["noisy"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"single": [[0.5, 1.0], [0.4, 1.1]]}, "levels that rise to 1"),
        ({"chunks": [[0.5, 1.0], [0.9, 1.1]]}, "levels that rise to 1"),
        ({"single": [[1.0, 0.0]]}, "ratios above 0"),
        ({"lasting": [[1.0, 0.7], [2.0, 0.5]]}, "at most 1 in all"),
        ({"lasting": [[0.0, 0.5]]}, "seconds above 0"),
        ({"stalls": [[-1.0, 0.5]]}, "at least 0"),
        ({"single": [[1.0]]}, "unpack"),
        ({"spread": []}, "spread"),
    ],
)
def test_what_is_no_jitter_is_refused(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    path = tmp_path / "wrong.json"
    profile = to_json(find("cpu-2-core-avx512"))
    profile["cpu-2-core-avx512"]["jitter"] = entry
    path.write_text(json.dumps(profile))
    with pytest.raises(UserError, match=message):
        read_profile(path)


def _at(table: tuple[tuple[float, float], ...], level: float) -> float:
    return next(ratio for end, ratio in table if level <= end)


def _widths(table: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    ends = [level for level, _ in table]
    return [(ratio, end - low) for (end, ratio), low in zip(table, [0.0, *ends], strict=False)]
