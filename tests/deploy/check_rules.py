"""`make check-deploy`: parse each expression of the alert rules as Prometheus does, by GreptimeDB's promql-parser."""

from __future__ import annotations

import sys

import promql_parser  # type: ignore[import-not-found]
import yaml


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        groups = yaml.safe_load(file)["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        promql_parser.parse(rule["expr"])
    print(f"{path}: {len(rules)} rules are valid")


if __name__ == "__main__":
    main(sys.argv[1])
