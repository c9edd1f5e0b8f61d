"""`make check-deploy`: render the Helm chart by Helm itself, and check what it makes, and a manifest of the Prometheus
Operator's objects, against the schemas of Kubernetes and of that operator."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-not-found]
import yaml

try:
    import helm_python as helm  # type: ignore[import-not-found]
except ImportError:
    if platform.machine() == "x86_64":
        raise
    sys.exit("the chart is not checked: Helm has no wheel for this processor")

CUSTOM = json.loads(Path(__file__).with_name("prometheus_operator.json").read_text())
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "model": "/models/llama",
        "servedModelNames": ["llama", "default"],
        "extraArgs": ["--max-model-len", "8192"],
        "extraEnv": [{"name": "QUIRE_LOG_LEVEL", "value": "debug"}],
        "image": {"repository": "registry.example/quire", "tag": "cuda", "pullSecrets": ["registry"]},
        "gpu": {"count": 2},
        "keys": {"secret": "keys", "file": "keys.toml"},
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.org/kind": "internal"}},
        "allowedHosts": ["llm.example.org"],
        "models": {"existingClaim": "models"},
        "cache": {"enabled": True, "storageClass": "fast"},
        "files": {"enabled": True, "quota": "8GiB"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "alertRules": {"enabled": True, "labels": {"release": "prometheus"}},
        "podAnnotations": {"example.org/team": "search"},
        "podLabels": {"team": "search"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "serving",
    },
    "claims that exist, no keys": {
        "replicas": 3,
        "keys": {"apiKey": ""},
        "cache": {"enabled": True, "existingClaim": "cache"},
        "podDisruptionBudget": {"enabled": False},
        "serviceMonitor": {"enabled": True},
    },
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"modell": "/models/llama"}, "modell"),
    ({"replicas": "two"}, "replicas"),
    ({"gpu": {"count": -1}}, "count"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"sharedMemory": "much"}, "sharedMemory"),
    ({"service": {"port": 0}}, "port"),
    ({"files": {"enabled": True}, "replicas": 2}, "replicas must be 1"),
]
"""Values, and a word of the refusal."""


def main(chart: str, manifest: str, monitoring: str) -> None:
    with open(monitoring, encoding="utf-8") as file:
        for each in yaml.safe_load_all(file):
            check(each)
    print(f"{monitoring} is valid")
    found = helm.lint(chart)
    assert not found["errors"], found
    with helm.Chart.load(chart) as loaded:
        for name, values in CASES.items():
            objects = rendered(loaded, values)
            for each in objects:
                check(each)
            if name == "defaults":
                agrees(objects, manifest)
            print(f"{chart} with {name}: {len(objects)} valid objects")
        for values, word in WRONG:
            refusal = ""
            try:
                rendered(loaded, values)
            except helm.HelmError as error:
                refusal = str(error)
            assert word in refusal, (values, refusal)
    print(f"{chart}: {len(WRONG)} wrong values are refused")


def rendered(chart: Any, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    files: dict[str, str] = chart.render(dict(values), name="quire", namespace="serving")
    assert not re.search(r"\{\{|<no value>|<nil>", files.pop("quire/templates/NOTES.txt"))
    return [each for text in files.values() for each in yaml.safe_load_all(text) if each is not None]


def check(each: dict[str, Any]) -> None:
    """Raises ValidationError."""
    if each["apiVersion"].startswith("monitoring.coreos.com/"):
        jsonschema.validate(each, _strict(CUSTOM[each["kind"]]))
    else:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def _strict(schema: Any) -> Any:
    """The schema, with unknown fields refused as by `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # Go's syntax of flags: (?i) stands inside the pattern.
    found: dict[str, Any] = {
        name: re.sub(r"^\^\(\?i\)(.*)", r"(?i)^\1", value)
        if name == "pattern" and isinstance(value, str)
        else _strict(value)
        for name, value in schema.items()
    }
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        known = {"apiVersion", "kind", "metadata"} & found["properties"].keys()
        found["additionalProperties"] = False
        if known == {"apiVersion", "kind", "metadata"}:
            found["properties"]["metadata"] = {"type": "object"}
    return found


def agrees(objects: list[dict[str, Any]], manifest: str) -> None:
    """Compare the pod that the default values make with the manifest's."""
    with open(manifest, encoding="utf-8") as file:
        [other] = (each for each in yaml.safe_load_all(file) if each["kind"] == "Deployment")
    [own] = (each for each in objects if each["kind"] == "Deployment")
    pods = [each["spec"]["template"]["spec"] for each in (own, other)]
    containers = [pod.pop("containers")[0] for pod in pods]
    for container in containers:
        container["args"] = [word for word in container["args"] if word not in ("--shutdown-timeout", "30")]
        container.pop("image")
        container.pop("imagePullPolicy", None)
    assert containers[0] == containers[1], containers
    assert pods[0] == pods[1], pods
    rest = [
        {name: value for name, value in each["spec"].items() if name not in ("template", "selector")}
        for each in (own, other)
    ]
    assert rest[0] == rest[1], rest


if __name__ == "__main__":
    main(*sys.argv[1:])
