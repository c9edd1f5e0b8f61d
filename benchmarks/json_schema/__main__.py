"""JSON schemas, keyword by keyword: python -m benchmarks.json_schema --suite DIR --bench DIR [--every 10]

--suite, --bench: checkouts (benchmarks/json_schema/data.py names the commits); either may be left out. --every: the
distance between the schemas taken from JSONSchemaBench. --engine: quire or llguidance, or both. --worst: the number of
schemas to print that are wrong, refused or lost. Each schema runs in a process of its own. Prints for each keyword how
many schemas are followed, refused, slow or crashed, of those followed how many are narrower (a text that follows is
masked) or wrong (a text that does not follow is taken, or a random text fails midway); and the times of compiling and
of masks.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from benchmarks.json_schema.data import Case, bench_cases, suite_cases
from benchmarks.json_schema.engines import ENGINES
from benchmarks.json_schema.trial import NUM_WALKS, Result, run

WARM = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}, "patternProperties": {"^b": {}}}
COLUMNS = ("followed", "refused", "slow", "crashed", "narrow", "wrong")


def main() -> None:
    arguments = _arguments()
    results: dict[str, dict[str, list[Result]]] = defaultdict(dict)
    sets: list[tuple[str, Iterable[Case]]] = []
    if arguments.suite:
        sets.append(("suite", suite_cases(arguments.suite)))
    if arguments.bench:
        sets.append(("bench", islice(bench_cases(arguments.bench), arguments.first, None, arguments.every)))
    for name, cases in sets:
        for engine in arguments.engine:
            cases = list(cases)
            found = measured(cases, engine, arguments.walks, arguments.processes)
            results[name][engine] = found
            print_table(f"{name}, {engine}", found, arguments.worst)
        if len(arguments.engine) == 2:
            print_lost(results[name]["quire"], results[name]["llguidance"], arguments.worst)
    if arguments.output:
        arguments.output.write_text(
            json.dumps({n: {e: [vars(r) for r in f] for e, f in each.items()} for n, each in results.items()})
        )


def measured(cases: Sequence[Case], engine: str, num_walks: int, num_processes: int) -> list[Result]:
    for _ in range(3):
        ENGINES[engine](WARM)  # what each process would load first
    with ThreadPoolExecutor(num_processes) as threads:
        return list(threads.map(lambda case: run(case, ENGINES[engine], num_walks), cases))


def print_table(title: str, results: Sequence[Result], num_worst: int) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for key in (result.keyword, "all"):
            counts[key][result.state] += 1
            counts[key]["narrow"] += bool(result.narrow)
            counts[key]["wrong"] += bool(result.wrong)
    print(f"\n{title}: {len(results)} schemas\n{'':28}" + "".join(f"{column:>10}" for column in COLUMNS))
    for key in sorted(counts, key=lambda key: (key == "all", key)):
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
    parser.add_argument("--engine", choices=list(ENGINES), nargs="+", default=list(ENGINES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--worst", type=int, default=10)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
