"""Image, Compose file, systemd unit and Kubernetes manifests: options that the parser takes, and numbers that agree."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from quire.cli.parser import given
from quire.cli.serve import build_parser
from quire.engine.async_engine import AsyncLLM
from quire.engine.process_client import DEFAULT_STARTUP_TIMEOUT
from quire.server.openapi import OPERATIONS
from quire.server.run import SHUTDOWN_GRACE_SECONDS
from quire.server.settings import ServerSettings
from tests.architecture.source import ROOT
from tests.deploy import files

COMMANDS = {
    "image": files.entrypoint(),
    "unit": files.unit_command(),
    "kubernetes": [*files.entrypoint(), *files.container()["args"]],
}
WHEELS = "dist/*.whl"
"""What `make wheel` leaves."""
ENGINE_SECONDS = inspect.signature(AsyncLLM.shutdown).parameters["timeout"].default
"""What the engine process gets to end."""


def settings_of(command: list[str]) -> ServerSettings:
    program, subcommand, *options = command
    assert (program, subcommand) == ("quire", "serve")
    return ServerSettings.from_keywords(given(build_parser().parse(options), ServerSettings))


@pytest.mark.parametrize("place", COMMANDS)
def test_the_parser_takes_the_options(place: str) -> None:
    settings = settings_of(COMMANDS[place])
    assert settings.restart_engine
    assert settings.shutdown_timeout == ServerSettings().shutdown_timeout


def test_a_stop_takes_less_than_it_may() -> None:
    stop = ServerSettings().shutdown_timeout + SHUTDOWN_GRACE_SECONDS + ENGINE_SECONDS
    compose = files.seconds(files.compose()["stop_grace_period"])
    unit = files.seconds(files.unit()["Service"]["TimeoutStopSec"])
    pre_stop = files.container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop[0] == "sleep"
    pod = files.pod()["terminationGracePeriodSeconds"] - int(pre_stop[1])
    assert min(compose, unit, pod) >= stop + 5
    [advice] = re.findall(r"--stop-timeout (\d+)", (files.DEPLOY / "docker" / "Dockerfile").read_text())
    assert int(advice) == compose
    assert files.instruction("STOPSIGNAL") == "SIGTERM"
    assert files.unit()["Service"]["KillMode"] == "mixed"


def test_a_start_may_take_as_long_everywhere() -> None:
    startup = files.container()["startupProbe"]
    spans = [
        files.seconds(files.health_check()[0]["start-period"]),
        files.seconds(files.unit()["Service"]["TimeoutStartSec"]),
        startup["periodSeconds"] * startup["failureThreshold"],
    ]
    assert spans == [DEFAULT_STARTUP_TIMEOUT] * 3
    assert files.manifests()["Deployment"]["spec"]["progressDeadlineSeconds"] > DEFAULT_STARTUP_TIMEOUT


def test_ports_agree() -> None:
    port = settings_of(COMMANDS["image"]).port
    assert port == ServerSettings().port
    assert int(files.instruction("EXPOSE")) == port
    assert f"127.0.0.1:{port}/health" in files.health_check()[1][-1]
    assert files.compose()["ports"] == [f"127.0.0.1:{port}:{port}"]
    [exposed] = files.container()["ports"]
    [served] = files.manifests()["Service"]["spec"]["ports"]
    assert (exposed["containerPort"], served["port"], served["targetPort"]) == (port, port, exposed["name"])


def test_probes_ask_routes_that_need_no_key() -> None:
    probes = {name: files.container()[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert all(OPERATIONS["get", probe["path"]].is_public for probe in probes.values())


def test_nothing_runs_as_root() -> None:
    instructions = files.dockerfile()
    [uid] = re.findall(r"useradd --uid (\d+) ", dict(instructions[:3])["RUN"])
    users = [arguments for instruction, arguments in instructions if instruction == "USER"]
    assert users == [uid, "root", uid]  # root installs a compiler for the image with CUDA
    security = files.pod()["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, int(uid))
    limits = files.container()["securityContext"]
    assert not limits["allowPrivilegeEscalation"]
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in files.MANIFEST.read_text()
    assert files.unit()["Service"]["DynamicUser"] == "yes"


def test_the_gpu_patch_fits_the_deployment() -> None:
    patch = yaml.safe_load((files.DEPLOY / "kubernetes" / "gpu.yaml").read_text())
    [patched] = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == files.container()["name"]
    assert patched["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_the_build_context_exists() -> None:
    lines = (files.DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines[0] == "*"
    assert [name for name in kept if name != WHEELS and not (ROOT / name).exists()] == []
    copied = [arguments.split()[0] for instruction, arguments in files.dockerfile() if instruction == "COPY"]
    assert sorted(copied[:-1]) == sorted(kept)  # the last is from the stage that installs


def test_the_image_is_built_from_the_wheels() -> None:
    """Where the script looks for them, and without a compiler; the one that CUDA's kernels need comes behind it."""
    instructions = files.dockerfile()
    places = {
        source: target
        for each, arguments in instructions
        if each == "COPY"
        for source, target in [arguments.split()[-2:]]
    }
    program, _, wheels = files.install_command()
    assert (places[WHEELS], places["deploy/install.sh"]) == (f"{wheels}/", f"{program.removesuffix('install.sh')}")
    assert Path(program).parents[1] == Path(places["constraints.txt"])  # of which the script says that they are there
    before = [
        arguments for each, arguments in instructions[: instructions.index(("RUN", " ".join(files.install_command())))]
    ]
    assert not any(tool in arguments for tool in ("g++", "gcc", "cmake") for arguments in before)
    copied = next(arguments.split() for each, arguments in reversed(instructions) if each == "COPY")
    assert copied == ["--from=build", files.install_command()[1], files.install_command()[1]]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd looks for the program, which is not installed here: another one stands for it."""
    program = files.unit()["Service"]["ExecStart"].split()[0]
    assert files.install_command()[1] == program.removesuffix("/bin/quire")
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "quire.service"
    unit.write_text(files.UNIT.read_text().replace(program, sys.executable))
    checked = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
