"""The Grafana dashboard: its form, and that each expression asks for what a server exposes, under either prefix."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from quire.metrics.families import MetricNames
from quire.server.health import SilenceGauge
from tests.architecture.source import ROOT
from tests.metrics.test_names import make

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "quire.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
FUNCTIONS = {"sum", "rate", "histogram_quantile", "by", "le", "label_values"}

POSITION = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "additionalProperties": {"type": "integer", "minimum": 0},
    "properties": {"w": {"maximum": 24}, "x": {"maximum": 23}},
}
SOURCE = {"type": "object", "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}}}
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "title": {"type": "string", "minLength": 1},
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "refresh": {"type": "string"},
        "time": {"type": "object", "required": ["from", "to"]},
        "templating": {"type": "object", "required": ["list"]},
        "panels": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos"],
                "properties": {
                    "id": {"type": "integer"},
                    "type": {"enum": ["row", "timeseries", "stat"]},
                    "gridPos": POSITION,
                    "datasource": SOURCE,
                    "targets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["refId", "expr", "legendFormat", "datasource"],
                            "properties": {"refId": {"pattern": "^[A-Z]$"}, "datasource": SOURCE},
                        },
                    },
                },
            },
        },
    },
}
"""The parts of Grafana's dashboard model (schema version 36 and later) that this one uses."""


def test_form() -> None:
    jsonschema.validate(DASHBOARD, SCHEMA)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters)), panel["title"]


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def samples(names: MetricNames) -> dict[str, set[str]]:
    """Sample name -> labels, of a server."""
    metrics = make(names)
    metrics.registry.register(SilenceGauge(lambda: 0.0))
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(("prefix", "names"), [("vllm:", MetricNames.VLLM), ("quire_", MetricNames.QUIRE)])
def test_every_expression_asks_for_what_there_is(prefix: str, names: MetricNames) -> None:
    exposed = samples(names)
    asked: set[str] = set()
    queries = [VARIABLES[name]["definition"] for name in ("model", "instance")]
    for expression in [expression for _, expression in TARGETS] + queries:
        text = expression.replace("${prefix}", prefix)
        for name, matchers in re.findall(r"\b((?:vllm:|quire_)\w+)(?:\{([^}]*)\})?", text):
            assert name in exposed, f"{expression}: {name} is not exposed"
            labels = set(re.findall(r"(\w+)\s*=~?", matchers)) - {"instance"}  # which Prometheus adds
            assert labels <= exposed[name], expression
            asked.add(name)
    assert len(asked) > 25


def test_expressions_are_well_formed() -> None:
    for title, expression in TARGETS:
        for left, right in ("()", "[]", "{}"):
            assert expression.count(left) == expression.count(right), title
        words = set(re.findall(r"\b([a-z_]+)\s*\(", expression))
        assert words <= FUNCTIONS | {"by"}, title
        if re.search(r"_(total|bucket|sum|count)\b(?<!tokens_total)\{", expression):
            assert "rate(" in expression, f"{title}: a counter without its rate"
        grouped = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
        assert set(grouped) <= {"le", "reason", "finished_reason", "source", "status"}, title


def test_legends_name_labels_that_remain() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = f"by ({label})" in target["expr"] or "sum" not in target["expr"]
                assert kept, (panel["title"], label)


def test_every_variable_is_used() -> None:
    text = json.dumps([panel.get("targets") for panel in PANELS]) + json.dumps(VARIABLES["model"])
    for name in VARIABLES:
        assert f"${{{name}}}" in text or f"${name}" in text, name
    prefix: dict[str, Any] = VARIABLES["prefix"]
    assert [option["value"] for option in prefix["options"]] == prefix["query"].split(",") == ["vllm:", "quire_"]
