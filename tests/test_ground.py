"""The ground floor: errors, registry, sizes, clocks, environment, logging, lazy exports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire import envs
from quire.clock import SystemClock, VirtualClock
from quire.errors import (
    ConfigError,
    EngineDeadError,
    ModelLoadError,
    PromptTooLongError,
    QuireError,
    UnknownModelError,
    UserError,
    nearest_name,
    reject_unknown,
)
from quire.logging import configure_logging, get_logger
from quire.registry import Registry
from quire.utils.sizes import format_bytes, parse_bytes

# errors


def test_user_errors_carry_the_field_and_are_value_errors() -> None:
    error = UserError("top_p must be in (0, 1], not 3", param="top_p")
    assert (str(error), error.message, error.param) == (error.message, "top_p must be in (0, 1], not 3", "top_p")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("kind", [ConfigError, ModelLoadError, UnknownModelError, PromptTooLongError])
def test_mistakes_of_the_caller_are_user_errors(kind: type[UserError]) -> None:
    assert issubclass(kind, UserError)


def test_a_dead_engine_is_not_the_callers_mistake() -> None:
    assert issubclass(EngineDeadError, QuireError)
    assert not issubclass(EngineDeadError, UserError)


def test_nearest_name() -> None:
    assert nearest_name("blok_size", ["block_size", "seed"]) == "; did you mean 'block_size'?"
    assert nearest_name("zzz", ["block_size", "seed"]) == ""


def test_reject_unknown() -> None:
    reject_unknown(["seed"], iter(["seed", "model"]), "option")
    with pytest.raises(UserError, match=r"unknown option 'sed'; did you mean 'seed'\?") as caught:
        reject_unknown(["model", "sed"], iter(["seed", "model"]), "option")
    assert caught.value.param == "sed"


# registry


def test_registry_imports_on_first_use() -> None:
    registry = Registry("shape", {"round": "no_such_module:Circle", "path": "pathlib:Path"})
    assert "round" in registry
    assert list(registry) == ["path", "round"]
    assert registry.load("path") is Path
    with pytest.raises(ModuleNotFoundError):
        registry.load("round")


def test_registry_names_what_it_knows() -> None:
    registry = Registry("shape", {"square": "a:b", "circle": "c:d"})
    with pytest.raises(UserError, match=r"unknown shape 'sqare'; did you mean 'square'\? \(known: circle, square\)"):
        registry.load("sqare")


def test_registries_do_not_share_entries() -> None:
    entries = {"path": "pathlib:Path"}
    first, second = Registry("x", entries), Registry("x", entries)
    first.register("decoder", "json:JSONDecoder")
    assert "decoder" in first
    assert "decoder" not in second
    assert "decoder" not in entries


# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (4 * 1024**3, 4 * 1024**3),
        ("123", 123),
        ("5B", 5),
        ("2K", 2048),
        ("2KiB", 2048),
        ("2kb", 2000),
        ("1.5MiB", 3 * 1024**2 // 2),
        ("4G", 4 * 1024**3),
        ("4GB", 4 * 1000**3),
        (" 4 GiB ", 4 * 1024**3),
        ("1tib", 1024**4),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text, param="kv_cache_memory") == size


@pytest.mark.parametrize(
    "value", ["", "GiB", "4XB", "-1GiB", "1e9", "4 G i B", "nan", 0, -5, "0", "0.1B", 1.5, True, None]
)
def test_nonsense_sizes_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory must be") as caught:
        parse_bytes(value, param="kv_cache_memory")  # type: ignore[arg-type]
    assert caught.value.param == "kv_cache_memory"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5 * 1024**4, "5.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


# clocks


def test_virtual_clock_moves_when_told() -> None:
    clock = VirtualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    clock.advance(2.5)
    clock.advance(0)
    assert clock.now() == 12.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-0.1)


def test_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


# environment


@pytest.mark.parametrize(
    ("name", "value", "read", "expected"),
    [
        ("QUIRE_LOG_LEVEL", None, envs.log_level, "WARNING"),
        ("QUIRE_LOG_LEVEL", "debug", envs.log_level, "DEBUG"),
        ("QUIRE_NUM_THREADS", None, envs.num_threads, None),
        ("QUIRE_NUM_THREADS", "3", envs.num_threads, 3),
        ("QUIRE_API_KEY", None, envs.api_key, None),
        ("QUIRE_API_KEY", "", envs.api_key, None),
        ("QUIRE_API_KEY", "secret", envs.api_key, "secret"),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, read: Callable[[], object], expected: object
) -> None:
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    assert read() == expected


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("QUIRE_LOG_LEVEL", "LOUD", envs.log_level),
        *(("QUIRE_NUM_THREADS", value, envs.num_threads) for value in ("0", "-1", "two", "1.5", "")),
    ],
)
def test_nonsense_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        read()


def test_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(tmp_path))
    assert envs.runtime_directory() == tmp_path
    monkeypatch.delenv("QUIRE_RUNTIME_DIR")
    assert envs.runtime_directory().is_dir()


def test_affinity_cores() -> None:
    assert envs.affinity_cores() >= 1


# logging


def test_logging_is_configured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logger.level)
    configure_logging("INFO")
    configure_logging("ERROR")
    assert len(logger.handlers) == 1
    assert logger.level == logging.ERROR
    assert get_logger("quire.engine").getEffectiveLevel() == logging.ERROR


# the package


@pytest.mark.parametrize("name", quire.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(quire, name) is not None


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        quire.LLMM  # noqa: B018
