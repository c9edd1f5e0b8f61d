"""Alert rules, ServiceMonitor and socket unit: names that the server and the other files have."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import files
from tests.server.conftest import model_path, served, serving

__all__ = ["model_path", "served"]

ALERTS = files.DEPLOY / "prometheus" / "alerts.yaml"
WORDS = frozenset(
    [
        *("sum", "by", "rate", "increase", "deriv", "min_over_time", "histogram_quantile", "and", "up"),
        *("job", "instance", "reason", "le", "status"),
    ]
)
"""Words of the expressions that are no metric."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_have_what_prometheus_asks_for() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 0
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))
        assert rule["annotations"]["summary"].count("{{") == rule["annotations"]["summary"].count("}}") > 0


async def test_metrics_of_the_rules_are_the_servers(model_path: Path) -> None:
    async with serving(model_path) as served:
        await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        text = (await served.client.get("/metrics")).text
    known = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    for rule in rules():
        expression = re.sub(r'"[^"]*"', "", rule["expr"])
        names = set(re.findall(r"[a-z_:][a-z0-9_:]+", expression)) - WORDS
        assert names <= known, rule["alert"]
        assert names or rule["alert"] == "QuireDown"


def test_the_monitor_finds_the_service() -> None:
    monitor = yaml.safe_load((files.DEPLOY / "kubernetes" / "monitoring.yaml").read_text())
    [service] = (each for each in yaml.safe_load_all(files.MANIFEST.read_text()) if each["kind"] == "Service")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        each["name"] for each in service["spec"]["ports"]
    ]
    assert f'job="{service["metadata"]["labels"][monitor["spec"]["jobLabel"]]}"' in rules()[0]["expr"]


def test_systemd_takes_the_socket(tmp_path: Path) -> None:
    path = files.UNIT.with_suffix(".socket")
    socket = configparser.ConfigParser(strict=False)
    socket.read(path)
    assert socket["Socket"]["ListenStream"].endswith(":8000")
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = files.unit()["Service"]["ExecStart"].split()[0]
    (tmp_path / "quire.socket").write_text(path.read_text())
    (tmp_path / "quire.service").write_text(files.UNIT.read_text().replace(program, sys.executable))
    command = [analyze, "verify", str(tmp_path / "quire.socket")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
