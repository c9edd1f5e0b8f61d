"""The matrix of drafts beside other features, which stands in docs/features.md.

`python -m tests.e2e.draft_cells` runs the tests of all cells and writes the page: a cell is there when all its tests
have passed, and drafts were accepted in them. The tests compare tokens and log-probabilities with those without drafts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
START, END = "<!-- cells of drafts -->\n", "<!-- end of the cells -->"
DRAFTERS = ("n-gram", "suffix", "hostile", "EAGLE")
HERE = "tests/e2e/"
DRAFTS, CROSSINGS, TEXT = "test_drafts.py", "test_draft_crossings.py", "test_drafts_in_text.py"
Cells = tuple[str, str, str, str]


def _eagle(cells: Cells, test: str, parameters: str = "") -> Cells:
    """The cells with a test of heads in the last one."""
    end = rf"\[{parameters}\]" if parameters else ""
    return (*cells[:3], f"test_eagle.py::{test}{end}")


def _family(name: str) -> Cells:
    """The cells of a model in test_drafts.py, two steps in flight."""
    same = rf"{DRAFTS}::test_other_drafters\[{name}-(?:64-|torch-64-)?%s-[12]\]"
    return rf"{DRAFTS}::test_equal_bits\[{name}-(?:64-|torch-64-)?2\]", same % "suffix", same % "hostile", ""


def _crossing(test: str, parameters: str = "", *, end: str = "") -> Cells:
    name = rf"{CROSSINGS}::{test}\[%s{parameters}{end}\]"
    return name % "ngram", name % "suffix", "", ""


def _random(name: str) -> str:
    return rf"test_random_schedules.py::test_with_drafts\[{name}-60\]"


CELLS = MappingProxyType(
    {
        "a step at a time": (
            rf"{DRAFTS}::test_equal_bits\[llama-1\]",
            rf"{DRAFTS}::test_other_drafters\[llama-suffix-1\]",
            rf"{DRAFTS}::test_other_drafters\[llama-hostile-1\]",
            r"test_eagle.py::test_equal_bits\[eagle3-1\]",
        ),
        "two steps in flight; prefix hits; `n` > 1; beams in the same steps": _eagle(
            _family("llama"), "test_equal_bits", "eagle3-2"
        ),
        "chunks; preemption by recomputation and by swapping": (
            rf"{DRAFTS}::test_in_chunks_with_few_blocks\[llama-",
            *_family("llama")[1:3],
            r"test_eagle.py::test_in_chunks_with_few_blocks\[eagle3-(?:swap|recompute)\]",
        ),
        "random schedules, with aborts, time limits, priorities": (
            _random("ngram"),
            _random("suffix"),
            _random("hostile"),
            _random("eagle3"),
        ),
        "windows": _family("qwen3-window"),
        "chunked attention": _crossing("test_layers_of_other_kinds", "-llama4"),
        "latent attention": _crossing("test_layers_of_other_kinds", "-deepseek-v3"),
        "latents that are chosen among": _family("deepseek-v3.2"),
        "states": _family("qwen3.5-small-states"),
        "states and experts": _family("qwen3-next-few-experts"),
        "experts": _crossing("test_layers_of_other_kinds", "-mixtral"),
        "quantised weights and caches": _eagle(
            _crossing("test_weights_and_caches", "-.*quantization.*"), "test_other_ways_to_compute", ".*quantization.*"
        ),
        "schemas, patterns, forced tokens, marks": (
            rf"{TEXT}::test_the_text_without_drafts\[native-.-(a schema|a pattern).*-found\]",
            "",
            "",
            r"test_eagle.py::test_constraints\[2\]",
        ),
        "stop strings, penalties, budgets": (
            rf"{TEXT}::test_the_text_without_drafts\[native-.-(stop|penalties|a budget).*-found\]",
            "",
            "",
            "",
        ),
        "registered prefixes": _crossing("test_registered_prefixes"),
        "the disk tier": _crossing("test_disk_tier"),
        "sleep": _eagle(_crossing("test_sleep", "-1"), "test_a_speculator_is_served"),
        "two ranks": _eagle(_crossing("test_two_ranks"), "test_other_ways_to_compute", ".*parallel.*"),
        "an engine that is killed in a run": _crossing("test_restart_in_a_run", "-2"),
        "a device's rows, two steps in flight": (
            r"test_drafts_on_device.py::test_equal_bits\[2-True-2\]",
            r"test_text_drafts_on_device.py::test_equal_bits\[suffix-2\]",
            r"test_text_drafts_on_device.py::test_equal_bits\[hostile-2\]",
            r"test_heads_on_device.py::test_equal_bits\[eagle3-2\]",
        ),
        "a device's graphs, interpreted": (
            r"test_drafts_on_device.py::test_graphs_of_drafts_change_no_bit\[",
            "",
            "",
            "",
        ),
        "adapters": (r"test_adapters.py::.*\[.*drafts.*\]", "", "", ""),
    }
)
"""Feature -> for each of DRAFTERS a pattern of the tests' ids; empty: there is none."""


class Recorder:
    """A plugin that notes which tests passed, and how many drafts were accepted in each."""

    def __init__(self) -> None:
        self.accepted: dict[str, int] = {}
        self.failed: set[str] = set()
        self._count = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        from quire.scheduler import scheduler

        counted = scheduler.count_drafts

        def count(stats: Any, *others: Any) -> None:
            before = stats.accepted_draft_tokens_total
            counted(stats, *others)
            self._count += stats.accepted_draft_tokens_total - before

        self._count, scheduler.count_drafts = 0, count
        try:
            return (yield)
        finally:
            scheduler.count_drafts = counted
            told = [value for name, value in item.user_properties if name == "accepted drafts"]
            self.accepted[item.nodeid] = max([self._count, *map(int, map(str, told))])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        patterns = [pattern for cells in CELLS.values() for pattern in cells if pattern]
        items[:] = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in patterns)]


def table(shown: dict[str, tuple[bool, ...]]) -> str:
    """The matrix. shown: feature -> for each of DRAFTERS, the cell has passed."""
    files = {name: sorted({re.split("::", each)[0] for each in cells if each}) for name, cells in CELLS.items()}
    lines = [f"| beside drafts | {' | '.join(DRAFTERS)} | shown by |", f"|---|{'---|' * len(DRAFTERS)}---|"]
    for name, passed in shown.items():
        cells = " | ".join("yes" if each else "" for each in passed)
        lines.append(f"| {name} | {cells} | {', '.join(f'`{HERE}{each}`' for each in files[name])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    recorder = Recorder()
    files = sorted({HERE + re.split("::", each)[0] for cells in CELLS.values() for each in cells if each})
    pytest.main(["-q", "-n0", "-m", "long or not long", *files], plugins=[recorder])
    shown = {}
    for name, cells in CELLS.items():
        found = [[node for node in recorder.accepted if each and re.search(each, node)] for each in cells]
        shown[name] = tuple(
            bool(nodes) and all(recorder.accepted[node] > 0 and node not in recorder.failed for node in nodes)
            for nodes in found
        )
    page = PAGE.read_text()
    before, after = page.split(START)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table(shown)}\n{END}{after}")
    missing = [name for name, cells in CELLS.items() if shown[name] != tuple(map(bool, cells))]
    for name in missing:
        print(f"not shown: {name} {shown[name]}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
