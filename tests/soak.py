"""`make soak`: the random traffic of tests/fakes/traffic.py for as long as you like.

    python -m tests.soak [--steps 20000] [--seeds 4] [--first-seed 100]

Prints what each seed went through; the first failure ends the run with the episode's name, from which
`Episode(random.Random(name)).run()` replays it.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter

from tests.fakes.traffic import EXERCISED, run_traffic

COLUMNS = ("engine_steps", "episodes", "requests", "refused", "scheduled_tokens_total", *EXERCISED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="engine steps of each seed")
    parser.add_argument("--seeds", type=int, default=4, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=100)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # every small pool lowers max_model_len
    whole: Counter[str] = Counter()
    started = time.perf_counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        totals = run_traffic(seed, arguments.steps)
        whole += totals
        print(f"seed {seed}: {_line(totals)}", flush=True)
    print(f"all: {_line(whole)}")
    print(f"every step was checked, every completion compared with a lone run: {time.perf_counter() - started:.0f} s")


def _line(totals: Counter[str]) -> str:
    return ", ".join(f"{totals[name]:,} {name.removesuffix('_total').replace('_', ' ')}" for name in COLUMNS)


if __name__ == "__main__":
    main()
