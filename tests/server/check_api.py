"""Random requests, valid and not, against the OpenAPI document that a server serves, by schemathesis.

    python -m tests.server.check_api ST [--seconds 60]

ST: schemathesis' program. Each answer has a documented status, content type and schema, none is a server error, a 405
names the methods that there are, and no route that asks for a key answers without. Two servers: one that generates,
over the fake executor, and one that pools, over a tiny encoder.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tests.conftest  # noqa: F401  (the environment that tests run in, set before anything is imported)
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.server.run import serve
from quire.server.settings import ServerSettings

KEY = "key-of-the-check"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
    "ignored_auth",
)
STOPS_REQUESTS = ("/pause", "/sleep")
"""Routes after which requests wait until another one is asked."""
KINDS = {
    "generates": (),
    "pools": ("--include-path-regex", "embeddings|score|rerank|classify|pooling"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.check_api", description="Check the API.")
    parser.add_argument("program", help="schemathesis' st")
    parser.add_argument("--seconds", type=int, default=60, help="for each of the two servers")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.program in KINDS:
        return _serve(options.program)
    status = 0
    for kind, chosen in KINDS.items():
        with _served(kind) as url:
            command = [
                str(Path(options.program).absolute()),
                "run",
                f"{url}/openapi.json",
                "--header",
                f"Authorization: Bearer {KEY}",
            ]
            command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
            command += ["--seed", str(options.seed), "--max-time", str(options.seconds), "--max-examples", "30"]
            command += [word for path in STOPS_REQUESTS for word in ("--exclude-path", path)]
            # Texts of random characters are seldom ids and bodies that mean something: 400 and 404 are most answers.
            command += ["--warnings", "off", "--no-color", "--request-timeout", "120", *chosen]
            with tempfile.TemporaryDirectory() as directory:  # the program writes down what it found
                status |= subprocess.run(command, cwd=directory, check=False).returncode
    return min(status, 1)


@contextmanager
def _served(kind: str) -> Iterator[str]:
    """The address of a server in a process of its own. Raises AssertionError when it does not end as it should."""
    command = [sys.executable, "-m", "tests.server.check_api", kind]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split(" on ")[1].split()[0]
        server.terminate()
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.stdout.close()


def _serve(kind: str) -> int:
    logging.getLogger("quire").setLevel(logging.ERROR)  # thousands of fields have no effect, each logged once
    settings = ServerSettings(
        port=0,
        served_model_name=["tiny"],
        api_key=[KEY],
        enable_admin_routes=True,
        enable_sleep_mode=True,
        enable_tokenizer_info_endpoint=True,
    )
    with tempfile.TemporaryDirectory(prefix="quire-check-") as name:
        if kind == "generates":
            from tests.server.model_directory import write_model

            model, executor, num_blocks = write_model(Path(name) / "tiny"), "tests.server.executor:readable", 64
        else:
            from tests.models.encoders import ENCODERS
            from tests.models.harness import randomize
            from tests.test_llm_pooling import save_with_tokenizer

            model, executor = save_with_tokenizer(randomize(ENCODERS["bert"]()), Path(name)), DEFAULT_EXECUTOR
            num_blocks = None
        options = EngineOptions(model=str(model), num_threads=1, max_num_seqs=8, num_blocks_override=num_blocks)
        return serve(options, settings, executor=executor)


if __name__ == "__main__":
    sys.exit(main())
