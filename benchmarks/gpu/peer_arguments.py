"""What every engine of a comparison is started with."""

from __future__ import annotations

import argparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a directory with config.json: weights are random")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--share", type=float, required=True, help="of the card's memory, for everything")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()
