"""Helm chart: what `make check-deploy` cannot see without the engine."""

from __future__ import annotations

import re

import yaml

from quire.cli.parser import given
from quire.cli.serve import build_parser
from quire.server.settings import ServerSettings
from quire.version import __version__
from tests.deploy import files

CHART = files.DEPLOY / "helm" / "quire"


def test_the_parser_takes_the_options_of_the_chart() -> None:
    """Each option in the template, with a value that it takes there."""
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    options = re.findall(r"\"(--[a-z-]+)\"", template)
    values = {"--shutdown-timeout": "30", "--files-quota": "8GiB"}
    words = [word for option in options for word in (option, values.get(option, "x"))]
    settings = ServerSettings.from_keywords(given(build_parser().parse(words), ServerSettings))
    assert len(options) == len(set(options)) == 6
    assert settings.files_dir == settings.api_key_file == "x"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


def test_the_rules_of_the_chart_are_prometheus_own() -> None:
    """Their first one names the job, which is the chart's name."""
    assert (CHART / "alerts.yaml").resolve() == files.DEPLOY / "prometheus" / "alerts.yaml"
    rule = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"][0]["rules"][0]
    assert f'job="{yaml.safe_load((CHART / "Chart.yaml").read_text())["name"]}"' in rule["expr"]
