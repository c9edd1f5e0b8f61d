"""JSON schemas, keyword by keyword: python -m benchmarks.json_schema --suite DIR --bench DIR [--every 10]

--suite, --bench: checkouts (benchmarks/json_schema/data.py names the commits); either may be left out. --every: the
distance between the schemas taken from JSONSchemaBench, from number --first on: --every 10 --first 0 to 9 are shards
of the whole. --engine: those to measure (all that are installed). --output: a file for the results. --results: such
files, whose results are printed as one; then nothing runs. --worst: the number of schemas to print that are wrong,
refused or lost. Each schema runs in a process of its own. Prints for each group of schemas and each keyword in them how
many are followed, refused, slow or crashed, of those followed how many are narrower (a text that follows is masked) or
wrong (a text that does not follow is taken, or a random text fails midway); and the times of compiling and of masks.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from benchmarks.json_schema.data import Case, bench_cases, suite_cases
from benchmarks.json_schema.engines import ENGINES, installed
from benchmarks.json_schema.trial import NUM_WALKS, Result, run

WARM = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}, "patternProperties": {"^b": {}}}
Found: TypeAlias = dict[str, dict[str, list[Result]]]
"""Results by set of schemas and by engine, in the order of the schemas."""
ALL = "all"
COLUMNS = ("followed", "refused", "slow", "crashed", "narrow", "wrong")


def main() -> None:
    arguments = _arguments()
    found = read(arguments.results) if arguments.results else run_all(arguments)
    if arguments.output:
        arguments.output.write_text(
            json.dumps({n: {e: [vars(r) for r in f] for e, f in each.items()} for n, each in found.items()})
        )
    for name, by_engine in found.items():
        for engine, results in by_engine.items():
            print_table(f"{name}, {engine}", results, arguments.worst)
        if {"quire", "llguidance"} <= by_engine.keys():
            print_lost(by_engine["quire"], by_engine["llguidance"], arguments.worst)


def run_all(arguments: argparse.Namespace) -> Found:
    if missing := set(ENGINES) - set(installed()):
        print(f"left out, because it is not installed: {', '.join(missing)}")
    found: Found = {}
    sets: list[tuple[str, Iterable[Case]]] = []
    if arguments.suite:
        sets.append(("suite", suite_cases(arguments.suite)))
    if arguments.bench:
        sets.append(("bench", bench_cases(arguments.bench, arguments.first, arguments.every)))
    for name, each in sets:
        cases = list(each)
        found[name] = {
            engine: measured(cases, engine, arguments.walks, arguments.processes) for engine in arguments.engine
        }
    return found


def read(paths: Sequence[Path]) -> Found:
    """The results of several runs as those of one."""
    found: Found = {}
    for path in paths:
        for name, by_engine in json.loads(path.read_text()).items():
            for engine, results in by_engine.items():
                found.setdefault(name, {}).setdefault(engine, []).extend(Result(**result) for result in results)
    return found


def measured(cases: Sequence[Case], engine: str, num_walks: int, num_processes: int) -> list[Result]:
    for _ in range(3):
        ENGINES[engine](WARM)  # what each process would load first
    with ThreadPoolExecutor(num_processes) as threads:
        return list(threads.map(lambda case: run(case, ENGINES[engine], num_walks), cases))


def print_table(title: str, results: Sequence[Result], num_worst: int) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for key in (result.group, *result.keywords, ALL):
            counts[key][result.state] += 1
            counts[key]["narrow"] += bool(result.narrow)
            counts[key]["wrong"] += bool(result.wrong)
    print(f"\n{title}: {len(results)} schemas\n{'':28}" + "".join(f"{column:>10}" for column in COLUMNS))
    groups = {result.group for result in results}
    for key in sorted(counts, key=lambda key: (key == ALL, key not in groups, key)):
        print(f"{key:28}" + "".join(f"{counts[key][column]:10}" for column in COLUMNS))
    compile_times = [result.compile_time for result in results if result.state == "followed"]
    mask_times = [each for result in results for each in result.mask_times]
    for name, times in (("compiling", compile_times), ("masks", mask_times)):
        if times:
            times = sorted(times)
            p50, p99, most = (1e6 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1))
            print(f"{name}: p50 {p50:.1f} µs, p99 {p99:.1f} µs, max {most:.0f} µs")
    for result in results:
        for kind in ("wrong", "narrow"):
            for text in getattr(result, kind)[: num_worst and 2]:
                print(f"  {kind} {result.name}: {text}"[:300])
    reasons = Counter(_kind(result.reason) for result in results if result.state != "followed")
    for reason, count in reasons.most_common(num_worst):
        print(f"  {count:5} {reason}")


def print_lost(found: Sequence[Result], plain: Sequence[Result], num_worst: int) -> None:
    lost = [
        (ours, theirs)
        for ours, theirs in zip(found, plain, strict=True)
        if ours.state != "followed" and theirs.state == "followed" and theirs.compile_time <= 2 and not theirs.wrong
    ]
    gained = sum(a.state == "followed" and b.state != "followed" for a, b in zip(found, plain, strict=True))
    narrower = [a for a, b in zip(found, plain, strict=True) if b.state == "followed" and len(a.narrow) > len(b.narrow)]
    print(f"lost: {len(lost)}, gained: {gained}, narrower than llguidance alone: {len(narrower)}")
    for ours, _ in lost[:num_worst]:
        print(f"  lost {ours.name}: {ours.state} {ours.reason}"[:300])
    for ours in narrower[:num_worst]:
        print(f"  narrower {ours.name}: {ours.narrow[0]}"[:300])


def _kind(reason: str) -> str:
    """A reason without the place."""
    return " ".join(word for word in reason.split() if "/" not in word and "#" not in word)[:110]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--walks", type=int, default=NUM_WALKS)
    parser.add_argument("--engine", choices=installed(), nargs="+", default=installed())
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--worst", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--results", type=Path, nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    main()
