"""The options of the disk tier: what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import DEFAULT_OFFLOAD_SIZE, resolve
from quire.errors import ConfigError


def resolved(model: str, **options: object) -> EngineConfig:
    return resolve(EngineOptions.from_keywords({"model": model, **options}))


def test_nothing_is_kept_unless_asked(model: str) -> None:
    cache = resolved(model).cache
    assert (cache.offload_dir, cache.offload_size, cache.swap_space) == (None, 0, 0)


def test_a_directory_is_enough(model: str, tmp_path: Path) -> None:
    cache = resolved(model, kv_offload_dir=tmp_path / "kv").cache
    assert (cache.offload_dir, cache.offload_size) == (tmp_path / "kv", DEFAULT_OFFLOAD_SIZE)
    assert cache.swap_space is None, "the blocks pass through host memory, chosen from what is free"
    assert not (tmp_path / "kv").exists(), "to look at options creates nothing"


def test_sizes_are_obeyed(model: str) -> None:
    cache = resolved(model, kv_offload_dir="~/kv", kv_offload_size="3GiB", swap_space="64MiB").cache
    assert cache.offload_dir == Path.home() / "kv"
    assert (cache.offload_size, cache.swap_space) == (3 * 2**30, 64 * 2**20)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"kv_offload_size": "1GiB"}, "kv_offload_size", "which is not given"),
        ({"kv_offload_dir": ""}, "kv_offload_dir", "must name a directory"),
        ({"kv_offload_dir": "kv", "kv_offload_size": "many"}, "kv_offload_size", "must be a size"),
        ({"kv_offload_dir": "kv", "kv_offload_size": 0}, "kv_offload_size", "greater than zero"),
        ({"kv_offload_dir": "kv", "enable_prefix_caching": False}, "kv_offload_dir", "enable_prefix_caching=False"),
        ({"swap_space": "1GiB"}, "swap_space", "preemption_mode"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(model: str, options: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model, **options)
    assert caught.value.param == param
