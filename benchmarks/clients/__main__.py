"""Run the cases of other people's clients against this server, and print which pass.

    python -m benchmarks.clients [--only NAME ...] [--cache DIR] [--write docs/clients.md]

Each client is installed into an environment of its own in the cache directory, which needs a package index that pip and
npm know. The exit status is 1 when a case fails or a client cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.clients.clients import CLIENTS, Client
from benchmarks.clients.environments import InstallError
from benchmarks.clients.servers import Server, running

CACHE = Path("~/.cache/quire-clients")
SCRIPT_SECONDS = 900
MAX_REASON = 300


class Result(NamedTuple):
    """reason: why the case failed; None: it passed."""

    client: str
    case: str
    reason: str | None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__.splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where clients are installed (default: {CACHE})")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as a page of Markdown")
    options = parser.parse_args(arguments)
    cache = options.cache.expanduser().absolute()
    (cache / "logs").mkdir(parents=True, exist_ok=True)
    chosen = [client for client in CLIENTS if not options.only or client.name in options.only]
    results = run(chosen, cache)
    results.sort(key=lambda result: names.index(result.client))
    failed = [result for result in results if result.reason is not None]
    print(f"{len(results) - len(failed)} of {len(results)} cases pass")
    if options.write is not None:
        options.write.write_text(page(chosen, results))
    return 1 if failed else 0


def run(clients: Sequence[Client], cache: Path) -> list[Result]:
    """Run everything that is to be run against a server while it runs; print each result as it comes."""
    results: list[Result] = []

    def add(found: Iterable[Result]) -> None:
        for result in found:
            results.append(result)
            print(f"{result.client:20} {result.case:44} {'pass' if result.reason is None else 'FAIL'}", flush=True)
            if result.reason is not None:
                print(f"    {result.reason}", flush=True)

    installed = []
    for client in clients:
        try:
            client.environment.install(cache / client.name)
            installed.append(client)
        except InstallError as error:
            add([Result(client.name, "(installation)", str(error))])
    for name in dict.fromkeys(server for client in installed for server in client.scripts.values()):
        with running(name, cache / "logs") as server:
            for client in installed:
                for script, its_server in client.scripts.items():
                    if its_server == name:
                        add(run_script(client, script, server, cache))
    return results


def run_script(client: Client, script: str, server: Server, cache: Path) -> Iterable[Result]:
    """Run the cases of one file in the client's environment. They write a line of JSON each."""
    log = cache / "logs" / f"{script}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            client.environment.command(cache / client.name, script),
            env={**os.environ, **server.environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=cache / client.name,
        )
    try:
        output, _ = process.communicate(timeout=SCRIPT_SECONDS)
        end = None if process.returncode == 0 else f"it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = f"it did not end in {SCRIPT_SECONDS} s"
    for line in output.splitlines():
        if line.startswith('{"case"'):
            found = json.loads(line)
            yield Result(client.name, found["case"], _one_line(found["reason"]))
    if end is not None:
        yield Result(client.name, f"({script})", f"{end}: see {log}")


def page(clients: Sequence[Client], results: Sequence[Result]) -> str:
    """The table as Markdown."""
    lines = [
        "# Clients",
        "",
        "These clients, as published, call Quire's server, each from its own process.",
        "`python -m benchmarks.clients --write docs/clients.md` installs them outside the repository (13 GB, of which",
        "guidellm takes 6 and vLLM 3.4), runs the functions of `benchmarks/clients/cases` and writes this page.",
        "",
        "The server is `quire serve` with the bundled model, with it as an embedder (`--runner pooling`), or with a",
        "fake model whose answers the conversation dictates, so that every answer, call and event is known",
        "([decision 54](decisions/0054-clients-and-peers.md)). Open WebUI is not run: the test makes the calls of its",
        "version 0.12.4. Node's packages are the newest for Node 20.",
        "",
        "| client | packages | cases | passed |",
        "|---|---|---|---|",
    ]
    for client in clients:
        own = [result for result in results if result.client == client.name]
        passed = sum(result.reason is None for result in own)
        failures = "".join(f", **{r.case}: {r.reason}**" for r in own if r.reason is not None)
        scripts = ", ".join(f"`{script}`" for script in client.scripts)
        lines.append(f"| {client.name} | {client.version} | {scripts} | {passed} of {len(own)}{failures} |")
    return "\n".join(lines) + "\n"


def _one_line(reason: str | None) -> str | None:
    return None if reason is None else " ".join(reason.split())[:MAX_REASON]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
