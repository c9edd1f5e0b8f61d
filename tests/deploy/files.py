"""The files in deploy/, as tests read them."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from typing import Any

import yaml

from tests.architecture.source import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "quire.service"
MANIFEST = DEPLOY / "kubernetes" / "quire.yaml"
INSTALL = DEPLOY / "install.sh"


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of all stages, continued lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    return [(instruction, rest.strip()) for instruction, _, rest in (line.partition(" ") for line in lines if line)]


def instruction(name: str) -> str:
    """The arguments of the only instruction of that name."""
    [found] = [arguments for each, arguments in dockerfile() if each == name]
    return found


def install_command() -> list[str]:
    """The image's call of the script that installs: the script, its directory and its source."""
    [found] = [arguments for each, arguments in dockerfile() if each == "RUN" and "install.sh" in arguments]
    return shlex.split(found)


def entrypoint() -> list[str]:
    """The image's command behind its process 1: `quire serve` and options."""
    command: list[str] = json.loads(instruction("ENTRYPOINT"))
    assert command[:2] == ["tini", "--"]
    return command[2:]


def health_check() -> tuple[dict[str, str], list[str]]:
    """Options and command of the image's health check."""
    options, _, command = instruction("HEALTHCHECK").partition("CMD ")
    return dict(option.lstrip("-").split("=") for option in options.split()), json.loads(command)


def compose() -> dict[str, Any]:
    """The one service of the Compose file."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    [service] = services.values()
    return dict(service)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser


def unit_command() -> list[str]:
    """`quire serve` and options, without the words that the environment file names."""
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    return [program.rpartition("/")[2], *(word for word in words if not word.startswith("$"))]


def manifests() -> dict[str, dict[str, Any]]:
    """Kind -> object."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    [found] = pod()["containers"]
    return dict(found)


def seconds(text: str) -> float:
    """30s, 30m, 30min or 30 (seconds)."""
    found = re.fullmatch(r"(\d+)(s|m|min|)", text)
    assert found is not None, text
    return int(found[1]) * (60 if found[2].startswith("m") else 1)
