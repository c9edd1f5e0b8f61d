"""Run each command and each Python block of README.md and docs/ as a reader does.

    python -m tests.check_docs [DOCUMENT...]        (make check-docs)

Commands run in bash, in a directory of their document with files of the names that they use. The bundled model stands
for each model that a reader would bring; a server of it answers the calls. tests/cli/examples.py lists what is not run.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.architecture.source import ROOT
from tests.cli.examples import ADDRESS, DOCUMENTS, PYTHON_NOT_RUN, blocks, is_serve, text_of, why_not_run
from tests.fakes.adapters import write_adapter

BUNDLED = ROOT / "quire" / "bundled" / "quire-python-5m"
MODELS = (
    *("MODEL", "SMALLER_MODEL", "path/to/model", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"),
    *("path/to/directory", "org/model"),  # those of `quire quantize`
)
"""Names of models in the documents; here each is a copy of the bundled one."""
SECONDS = 300.0
"""Time that a command may take."""
READY = re.compile(rb"http://[\w.]+:\d+")
ENOUGH = re.compile(rb"\x1b\[|KV")
"""Output of a command that goes on until it is interrupted, by which it has shown that it works."""


def prepare(folder: Path) -> None:
    """Make the files that commands of the documents read."""
    for name in MODELS:
        shutil.copytree(BUNDLED, folder / name)
    for name in MODELS[-2:]:  # GGUF has a name for GPT-2's rule of splitting words, not for the bundled one's
        tokenizer = json.loads((folder / name / "tokenizer.json").read_text())
        split = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
        content = {**tokenizer, "pre_tokenizer": split, "normalizer": None}
        (folder / name / "tokenizer.json").write_text(json.dumps(content))
    write_experts(folder / "MODEL_OF_EXPERTS")
    for name in ("home/.config/fish/completions", "home/.zfunc"):
        (folder / name).mkdir(parents=True)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("picture.png", "photo.png"):
        Image.new("RGB", (64, 64), "red").save(folder / name)
    (folder / "text.txt").write_text((ROOT / "quire" / "llm.py").read_text()[:8000])
    (folder / "path/to/config.json").write_text((BUNDLED / "config.json").read_text())
    body = {"model": "bundled", "prompt": "def f(", "max_tokens": 4}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = [{"prompt": "def f(", "max_tokens": 4}] * 4
    (folder / "workloads.json").write_text(json.dumps({"batch32": requests}))
    arrivals = [{"arrival": 0.1 * i, "input_tokens": 800, "output_tokens": 300} for i in range(1500)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in arrivals))
    rows = [",".join(arrivals[0]), *(",".join(map(str, each.values())) for each in arrivals)]
    (folder / "trace.csv").write_text("\n".join(rows) + "\n")


def write_gguf(folder: Path) -> None:
    process = start("quire quantize path/to/directory --to q8_0 -o path/to/model.gguf", folder)
    process.communicate()
    assert process.returncode == 0, (folder / "errors").read_text()


def write_experts(directory: Path) -> None:
    """Write a random Mixtral with the bundled model's tokenizer."""
    shutil.copytree(BUNDLED, directory)
    (directory / "model.safetensors").unlink()
    own = json.loads((BUNDLED / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": own["vocab_size"]}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=256)).save_pretrained(directory)


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def start(command: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "errors").open("wb"),
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[bytes], pattern: re.Pattern[bytes]) -> bytes:
    """Output of a process up to where the pattern is found, its end, or the time limit."""
    assert process.stdout is not None
    found, end = b"", time.monotonic() + SECONDS
    while not pattern.search(found) and time.monotonic() < end:
        if select.select([process.stdout], [], [], 1.0)[0]:
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                break
            found += more
    return found


def end(process: subprocess.Popen[bytes], sign: int) -> int:
    """Exit status of a process that gets a signal, with its group; it is killed where it does not end."""
    if process.poll() is None:
        os.killpg(process.pid, sign)
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode


def serve(command: str, folder: Path, document: str) -> str | None:
    """Start a server, wait until it is ready, and stop it; the reason of a failure.

    A refusal whose words the document shows is none.
    """
    command = re.sub(r"--port \d+", "", command)
    lines = command.partition("#")[0].rstrip() + " --port 0"
    process = start(f"exec {lines}", folder)
    is_ready = READY.search(read_until(process, READY)) is not None
    status = end(process, signal.SIGTERM)
    error = (folder / "errors").read_text().strip()
    if not is_ready and error and error in text_of(document):
        return None
    return None if is_ready and status == 0 else f"exit {status}: {error[-400:]}"


def run(command: str, folder: Path, document: str) -> str | None:
    """Run one command; the reason of a failure."""
    if is_serve(command):
        return serve(command, folder, document)
    process = start(command, folder)
    if re.match(r"quire top (?!--once)", command):
        read_until(process, ENOUGH)
        status = end(process, signal.SIGINT)
        return None if status in (0, 130) else f"exit {status}: {(folder / 'errors').read_text()[-400:]}"
    try:
        process.communicate(b"/exit\n" if command.startswith("quire chat") else b"", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        end(process, signal.SIGKILL)
        return f"no end within {SECONDS:.0f} s"
    error = (folder / "errors").read_text().strip()
    return None if process.returncode == 0 else f"exit {process.returncode}: {error[-400:]}"


def here(command: str, address: str) -> str:
    """The command with the address of the server that runs, in place of the usual one."""
    return re.sub(r"^quire top(?! +https?:)", f"quire top {address}", command.replace(ADDRESS, address))


def check(document: str, address: str) -> Iterator[tuple[str, float, str | None]]:
    """Run what a document shows: commands with their seconds and the reason of a failure."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if document == "docs/adapters.md":
            write_adapter(AutoModelForCausalLM.from_pretrained(BUNDLED), folder / "adapters" / "sql")
        if document == "README.md":
            write_gguf(folder)
        program = ""
        for block in blocks(document):
            commands = [each for each in block.commands() if why_not_run(each) is None]
            if block.language == "python" and document not in PYTHON_NOT_RUN:
                program += block.text
                (folder / "program.py").write_text(program.replace(ADDRESS, address))
                commands = [f"{sys.executable} program.py"]
            for command in commands:
                started = time.monotonic()
                failure = run(here(command, address), folder, document)
                yield command, time.monotonic() - started, failure


@contextmanager
def server() -> Iterator[str]:
    """Address of a server of the bundled model."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home").mkdir()
        process = start("exec quire serve --kv-cache-memory 64MiB --port 0", folder)
        try:
            found = READY.search(read_until(process, READY))
            assert found, (folder / "errors").read_text()
            yield found[0].decode()
        finally:
            end(process, signal.SIGTERM)


def main(documents: list[str]) -> int:
    failed = ran = 0
    with server() as address, ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda document: [(document, *each) for each in check(document, address)], documents):
            for document, command, seconds, failure in found:
                ran += 1
                print(f"{seconds:6.1f} s  {document}: {command.splitlines()[0][:100]}", flush=True)
                if failure is not None:
                    failed += 1
                    print(f"          FAILED: {failure}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"==> {ran} commands and programs, {failed} failed, {used.ru_utime + used.ru_stime:.0f} s of the processor")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or DOCUMENTS))
