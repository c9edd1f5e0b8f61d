"""The clients: what is installed for each, and which files of `cases` it runs against which server."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.clients.environments import Environment, NodeEnvironment, PythonEnvironment


@dataclass(frozen=True)
class Client:
    """scripts: file of `cases` -> the server that it is run against."""

    name: str
    environment: Environment
    scripts: dict[str, str]

    @property
    def version(self) -> str:
        return ", ".join(self.environment.packages)


def _python(name: str, *requirements: str, **scripts: str) -> Client:
    return Client(name, PythonEnvironment(*requirements), {f"{file}.py": server for file, server in scripts.items()})


def _node(name: str, *packages: str, **scripts: str) -> Client:
    return Client(name, NodeEnvironment(*packages), {f"{file}.mjs": server for file, server in scripts.items()})


CLIENTS = (
    _python(
        "openai-python",
        "openai==3.54.0",
        openai_chat="scripted",
        openai_python="scripted",
    ),
    _python("anthropic-python", "anthropic==2.12.0", anthropic_python="scripted"),
)
