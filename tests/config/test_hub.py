"""Models of a hub: a server on this machine in its place, and the library as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.server.model_directory import write_model

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
FILES: dict[str, dict[str, bytes] | None] = {
    "someone/tiny-GGUF": {
        "tiny-Q4_K_M.gguf": b"four bits",
        "tiny-q8_0.gguf": b"eight bits",
        "mmproj-tiny-Q8_0.gguf": b"images",
        "tiny-BF16-00001-of-00002.gguf": b"one",
        "tiny-BF16-00002-of-00002.gguf": b"two",
        "README.md": b"text",
    },
    "someone/many": {f"part-{number}-Q4_K_M.gguf": b"" for number in range(20)},
    "someone/gated": None,
}
PROGRAM = """
import sys
from quire.config.hub import fetch
from quire.errors import ModelLoadError
for name in sys.argv[1:]:
    try:
        path = fetch(name, None, False)
        print(path.name, path.read_bytes().decode())
    except ModelLoadError as error:
        print("error:", error)
"""


TOKENIZERS = """
import sys
from quire.config.options import EngineOptions
from quire.tokenization.tokenizer import open_tokenizer
for name, revision, directory in zip(*[iter(sys.argv[1:])] * 3):
    options = EngineOptions(
        model="unused", tokenizer=name, tokenizer_revision=revision or None, revision="not its own",
        download_dir=directory or None,
    )
    print(open_tokenizer(options, 300).chat_template)
"""


class Hub(BaseHTTPRequestHandler):
    """The requests that a snapshot is made of: a repository, its files, and one of them."""

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        is_listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_listing else parts[:2])
        commit = OTHER_COMMIT if OTHER_COMMIT in parts or "other" in parts else COMMIT
        name += "@other" if f"{name}@other" in FILES and commit == OTHER_COMMIT else ""
        files = FILES.get(name, {})
        if name == "someone/page":
            return self._answer(200, b"<html>\n<p>log in</p></html>", {"Content-Type": "text/html"})
        if name == "someone/empty":
            return self._answer(200, b"[]", {"Content-Type": "application/json"})
        if name == "someone/broken":
            return self._answer(500, b"a\nb" * 5000, {"X-Error-Message": "c" * 5000})
        if name not in FILES:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if files is None:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if is_listing and "tree" in parts:
            tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": file} for file in files]
            return self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if is_listing:
            found = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        content = files[parts[-1]]
        return self._answer(200, content, {"ETag": f'"{parts[-1]}-{commit}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the test's output is the program's."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(names: list[str], home: Path, program: str = PROGRAM, **environment: str) -> list[str]:
    values = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, *names], env=values, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.splitlines()


def test_files_of_a_repository_by_the_end_of_their_names(endpoint: str, tmp_path: Path) -> None:
    tags = [":Q4_K_M", ":Q8_0", ":BF16", ":Q2_K", ""]
    names = [f"someone/tiny-GGUF{tag}" for tag in tags]
    four, eight, split, none, usual, gated, missing = fetched(
        [*names, "someone/gated", "someone/nothing:Q4_0"], tmp_path, HF_ENDPOINT=endpoint
    )
    assert (four, eight) == ("tiny-Q4_K_M.gguf four bits", "tiny-q8_0.gguf eight bits")
    assert split == "tiny-BF16-00001-of-00002.gguf one"
    assert usual == four
    assert none == "error: the hub's 'someone/tiny-GGUF' has no file *Q2_K.gguf"
    assert gated.startswith("error: model 'someone/gated' is gated: accept its terms")
    assert missing.startswith("error: model 'someone/nothing' is neither a directory nor on the hub")
    cached, unknown = fetched([names[0], "someone/else"], tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert cached == four
    assert unknown.startswith("error: model 'someone/else' is neither a directory nor a reachable hub id: ")


def test_what_the_hub_may_not_answer_is_one_line(endpoint: str, tmp_path: Path) -> None:
    names = ["someone/page", "someone/empty", "someone/broken", "someone/many:Q4_K_M"]
    lines = fetched(names, tmp_path, HF_ENDPOINT=endpoint)
    assert len(lines) == len(names)
    for name, line in zip(names[:3], lines, strict=False):
        assert line.startswith(f"error: model {name!r}")
        assert len(line) < 1200
    assert "has 20 files *Q4_K_M.gguf: part-0-" in lines[3]
    assert lines[3].count(".gguf,") == 8
    assert "..." in lines[3]


def test_a_tokenizers_own_revision_and_the_directory_that_files_come_to(endpoint: str, tmp_path: Path) -> None:
    for name, template in (("someone/words", "of main"), ("someone/words@other", "of other")):
        directory = write_model(tmp_path / name, template)
        FILES[name] = {path.name: path.read_bytes() for path in directory.iterdir()}
    home, chosen = tmp_path / "home", tmp_path / "chosen"
    arguments = ["someone/words", "other", str(chosen), "someone/words", "", str(chosen)]
    assert fetched(arguments, home, TOKENIZERS, HF_ENDPOINT=endpoint) == ["of other", "of main"]
    assert len(list(chosen.rglob("tokenizer.json"))) == 2
    assert not list(home.rglob("tokenizer.json"))
