"""Run fuzzers for a time or a number of cases."""

from __future__ import annotations

import argparse
import logging
import sys

import tests.conftest  # noqa: F401  (the environment that tests run in, set before anything is imported)
from tests.fuzz.harness import FindingError, run_fuzzer
from tests.fuzz.registry import FUZZERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = ", ".join(fuzzer.name for fuzzer in FUZZERS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; default: all")
    parser.add_argument(
        "--seconds", type=float, help="how long each runs (default 60, or no limit with --cases or --times)"
    )
    parser.add_argument("--cases", type=int, help="how many cases each fuzzer tries at most")
    parser.add_argument("--times", type=int, help="try this many times the cases of `make test` at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    options = parser.parse_args()
    unknown = set(options.names) - {fuzzer.name for fuzzer in FUZZERS}
    if unknown:
        parser.error(f"unknown fuzzers: {', '.join(sorted(unknown))}")
    if options.cases and options.times:
        parser.error("give --cases or --times")
    seconds = options.seconds if options.seconds or options.cases or options.times else 60.0
    logging.getLogger("quire").setLevel(logging.ERROR)  # what is odd about a case is no finding
    num_findings = 0
    for fuzzer in FUZZERS:
        if options.names and fuzzer.name not in options.names:
            continue
        limit = fuzzer.num_test_cases * options.times if options.times else options.cases
        try:
            num_cases = run_fuzzer(fuzzer, seed=options.seed, first=options.first, num_cases=limit, seconds=seconds)
        except FindingError as finding:
            num_findings += 1
            print(f"{fuzzer.name}: {finding}", file=sys.stderr, flush=True)
        else:
            print(f"{fuzzer.name}: {num_cases:,} cases, nothing found (seed {options.seed})", flush=True)
    return min(num_findings, 1)


if __name__ == "__main__":
    sys.exit(main())
