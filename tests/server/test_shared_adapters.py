"""What several API processes tell one another of adapters."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.adapter_orders import AdapterRef
from quire.config.adapters import AdaptersConfig
from quire.engine import adapters
from quire.engine.adapters import KnownAdapters
from quire.errors import UserError
from quire.server.adapters import LoraModule, ServedAdapters
from quire.server.errors import ApiError
from quire.server.settings import ServerSettings
from quire.server.shared_adapters import NumberedAdapter, SharedAdapters
from tests.fakes.adapters import write

LIMITS = AdaptersConfig(max_running=1, max_rank=16, num_slots=1)


class Process:
    """The adapters of one API process, before an engine that takes any."""

    def __init__(self, shared: Path | None, directory: Path) -> None:
        self.known = KnownAdapters(LIMITS)
        self.engine = SimpleNamespace(
            adapters=self.known,
            engine_config=SimpleNamespace(adapters=LIMITS),
            model_config=SimpleNamespace(pooling=True),
            pool=self._pool,
            pauses=False,
        )
        engine: Any = self.engine
        self.served = ServedAdapters(
            engine, str(directory), ("base",), None if shared is None else SharedAdapters.of(shared)
        )

    async def _pool(self, *arguments: object, **keywords: object) -> None:
        """Nothing is computed."""

    def digest(self, name: str) -> bytes | None:
        found = self.served.find(name)
        ref = self.known.resolve(found)
        return None if ref is None else ref.digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for rank, name in enumerate(("one", "two"), 1):
        write(tmp_path / "folders" / name, {}, {"r": rank, "lora_alpha": 8})
    return tmp_path / "folders"


@pytest.fixture
def pair(tmp_path: Path, directory: Path) -> tuple[Process, Process]:
    return Process(tmp_path, directory), Process(tmp_path, directory)


async def test_what_one_was_told_all_know(pair: tuple[Process, Process], directory: Path) -> None:
    first, second = pair
    await first.served.load(LoraModule("mine", str(directory / "one")))
    assert second.served.names == ["mine"]
    assert second.digest("mine") == first.digest("mine") is not None
    await second.served.load(LoraModule("mine", str(directory / "two")), load_inplace=True)
    assert first.digest("mine") == second.digest("mine")
    found = first.served.find("mine")
    assert found is not None
    assert found.path == str(directory / "two")
    await first.served.unload("mine")
    assert second.served.find("mine") is None
    with pytest.raises(ApiError, match="cannot be found"):
        await second.served.unload("mine")


async def test_numbers_of_two_that_are_read_at_once(
    pair: tuple[Process, Process], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process reads an adapter, it hears of another's."""
    first, second = pair
    await first.served.load(LoraModule("one", str(directory / "one")))
    read = adapters.open_adapter

    def slowly(*arguments: Any) -> Any:
        assert second.served.names == ["one"]
        return read(*arguments)

    monkeypatch.setattr(adapters, "open_adapter", slowly)
    second.known.add_name("two", str(directory / "two"))
    assert second.digest("one") == first.digest("one") != second.digest("two")


async def test_a_name_that_another_has_given(pair: tuple[Process, Process], directory: Path) -> None:
    first, second = pair
    assert second.served.names == []
    await first.served.load(LoraModule("mine", str(directory / "one")))
    with pytest.raises(UserError, match="has already been loaded"):
        await second.served.load(LoraModule("mine", str(directory / "two")))
    assert second.digest("mine") == first.digest("mine")


@pytest.mark.parametrize("name", ["mine", "other"])
@pytest.mark.parametrize("load_inplace", [False, True])
async def test_news_of_another_process_while_one_tries_an_adapter(
    pair: tuple[Process, Process], directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, load_inplace: bool
) -> None:
    """name: what the other process loads before the one has finished."""
    first, second = pair
    if load_inplace:
        await first.served.load(LoraModule("mine", str(directory / "one")))
    expected = Process(directory, directory)
    await expected.served.load(LoraModule("mine", str(directory / "two")))

    async def meanwhile(_adapter: object) -> None:
        await first.served.load(LoraModule(name, str(directory / "one")), load_inplace=load_inplace)
        assert name in {*second.served.names, "mine"}

    monkeypatch.setattr(second.served, "_try", meanwhile)
    loading = second.served.load(LoraModule("mine", str(directory / "two")), load_inplace=load_inplace)
    if name == "mine" and not load_inplace:
        with pytest.raises(UserError, match="has already been loaded"):
            await loading
        assert second.digest("mine") != expected.digest("mine")
    else:
        await loading
        assert second.digest("mine") == expected.digest("mine")
    assert second.digest("mine") == first.digest("mine") is not None
    assert set(second.served.names) == set(first.served.names) == {name, "mine"}


async def test_a_name_that_another_forgets_as_soon_as_it_is_told(
    pair: tuple[Process, Process], directory: Path
) -> None:
    first, second = pair
    await first.served.load(LoraModule("mine", str(directory / "one")))
    await second.served.unload("mine")
    assert first.served.names == []


async def test_an_adapter_outlives_files_that_do_not_fit(
    pair: tuple[Process, Process], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in (pair[0], Process(None, directory)):
        write(directory / "one", {}, {"r": 1, "lora_alpha": 8})
        module = LoraModule("mine", str(directory / "one"))
        await process.served.load(module)
        before = process.digest("mine")
        write(directory / "one", {}, {"r": 3, "lora_alpha": 8})

        async def refuse(_adapter: object) -> None:
            raise UserError("it does not fit")

        monkeypatch.setattr(process.served, "_try", refuse)
        with pytest.raises(UserError, match="does not fit"):
            await process.served.load(module, load_inplace=True)
        assert process.digest("mine") == before is not None


async def test_none_is_loaded_in_a_pause(pair: tuple[Process, Process], directory: Path) -> None:
    """The token that tries it would wait for the pause's end."""
    first, second = pair
    await first.served.load(LoraModule("mine", str(directory / "one")))
    before = first.digest("mine")
    first.engine.pauses = True
    for name in ("mine", "other"):
        with pytest.raises(ApiError, match="is paused") as caught:
            await first.served.load(LoraModule(name, str(directory / "two")), load_inplace=True)
        assert caught.value.status == 503
    for each in pair:
        assert each.served.names == ["mine"]
        assert each.digest("mine") == before
    first.engine.pauses = False
    await first.served.load(LoraModule("mine", str(directory / "two")), load_inplace=True)
    assert first.digest("mine") == second.digest("mine") != before


async def test_adapters_of_the_start_are_loaded_by_all(pair: tuple[Process, Process], directory: Path) -> None:
    for process in pair:
        await process.served.load_at_start(ServerSettings(lora_modules=[f"mine={directory / 'one'}"]))
    assert [process.served.names for process in pair] == [["mine"]] * 2


async def test_content_is_that_of_the_first_who_read_it(pair: tuple[Process, Process], directory: Path) -> None:
    """A folder that changes between two requests is for all what it was for the first of them."""
    first, second = pair
    await first.served.meet("one")
    before = first.digest("one")
    write(directory / "one", {}, {"r": 3, "lora_alpha": 8})
    await second.served.meet("one")
    assert second.digest("one") == before


async def test_names_that_lead_elsewhere(pair: tuple[Process, Process]) -> None:
    for name in ("../folders/one", "..", ".", "", "none", "base"):
        await pair[0].served.meet(name)
    assert pair[0].served.names == []


async def test_a_process_that_starts_later(pair: tuple[Process, Process], directory: Path, tmp_path: Path) -> None:
    await pair[0].served.load(LoraModule("mine", str(directory / "one"), "parent"))
    found = Process(tmp_path, directory).served.find("mine")
    assert found is not None
    assert (found.path, found.base_model_name) == (str(directory / "one"), "parent")


def test_a_table_with_the_time_and_inode_of_one_before_is_read(tmp_path: Path) -> None:
    """Within a clock tick of the kernel, files that replace one another have one time, and a free inode comes back."""
    reader, writer = SharedAdapters.of(tmp_path).numbered, SharedAdapters.of(tmp_path).numbered

    def write_table(scale: float) -> None:
        def change(table: dict[int, NumberedAdapter]) -> None:
            table[0] = NumberedAdapter(AdapterRef("path", b"digest"), scale)

        writer.change(change)
        os.utime(tmp_path / "numbered-adapters", ns=(0, 0))

    write_table(0.0)
    assert reader.news() is not None
    for scale in range(1, 9):
        write_table(scale + 0.25)
        write_table(scale + 0.5)
        news = reader.news()
        assert news is not None, scale
        assert news[0].scale == scale + 0.5
        assert reader.news() is None
