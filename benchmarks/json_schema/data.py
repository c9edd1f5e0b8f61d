"""Cases from the two public sets: schemas, with texts that follow them and texts that do not.

The JSON Schema Test Suite (json-schema-org/JSON-Schema-Test-Suite, MIT) at SUITE_COMMIT, and JSONSchemaBench with the
texts of its MaskBench (guidance-ai/jsonschemabench, no licence named) at BENCH_COMMIT. Neither is copied here: the
functions take directories that hold checkouts of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator

SUITE_COMMIT = "44401e0c046704b476ec9d2e2fccdaee618f259d"
BENCH_COMMIT = "ba103c73756198dd9b149ddc7db7867da7a077f6"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
ELSEWHERE = ("refRemote.json", "vocabulary.json")
"""Files of the suite whose schemas refer to other documents."""

KEYWORDS_OF_NAMES = {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"}
KEYWORDS_OF_DATA = {"const", "enum", "default", "examples"}
KEYWORDS = set(Draft202012Validator.VALIDATORS) | set(Draft7Validator.VALIDATORS) | KEYWORDS_OF_NAMES


@dataclass(frozen=True)
class Case:
    """A schema and texts. group: the keyword that it tests, or the source of the schema."""

    name: str
    group: str
    schema: Any
    texts: tuple[tuple[str, bool], ...]
    """Each with whether it follows the schema; its keys stand in the order of the schema's properties."""


def suite_cases(directory: Path) -> Iterator[Case]:
    """The test suite, 2020-12 and draft 7."""
    for draft, schema_uri in DRAFTS.items():
        for path in sorted((directory / "tests" / draft).glob("*.json")):
            if path.name in ELSEWHERE:
                continue
            for number, group in enumerate(json.loads(path.read_text())):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": schema_uri} | schema
                texts = tuple((ordered_text(test["data"], schema), test["valid"]) for test in group["tests"])
                yield Case(f"{draft}/{path.stem}/{number}", path.stem, schema, texts)


def bench_cases(directory: Path, first: int, every: int) -> Iterator[Case]:
    """JSONSchemaBench: the files of MaskBench, which have texts, from number `first` on with this distance."""
    for path in sorted((directory / "maskbench" / "data").glob("*.json"))[first::every]:
        found = json.loads(path.read_text())
        texts = tuple((ordered_text(test["data"], found["schema"]), test["valid"]) for test in found["tests"])
        yield Case(path.stem, path.stem.split("---")[0].rstrip("0123456789_"), found["schema"], texts)


def keywords_of(schema: Any) -> list[str]:
    """The keywords of a schema and of those within it, but not the names of properties and definitions."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            found |= part.keys() & KEYWORDS
            for keyword, value in part.items():
                if keyword in KEYWORDS_OF_NAMES and isinstance(value, dict):
                    todo += value.values()
                elif keyword not in KEYWORDS_OF_DATA:
                    todo.append(value)
    return sorted(found)


def ordered_text(value: Any, schema: Any) -> str:
    """JSON without blanks, its keys in the order in which the schema first names them."""
    ranks: dict[str, int] = {}
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            for name in part.get("properties", {}) if isinstance(part.get("properties"), dict) else ():
                ranks.setdefault(name, len(ranks))
            for name in part.get("required", ()) if isinstance(part.get("required"), list) else ():
                ranks.setdefault(str(name), len(ranks) + 10**6)
            todo += reversed(list(part.values()))
        elif isinstance(part, list):
            todo += reversed(part)
    return json.dumps(_sorted(value, ranks), ensure_ascii=False, separators=(",", ":"))


def _sorted(value: Any, ranks: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_sorted(each, ranks) for each in value]
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: ranks.get(name, 2 * 10**6))
        return {name: _sorted(value[name], ranks) for name in names}
    return value
