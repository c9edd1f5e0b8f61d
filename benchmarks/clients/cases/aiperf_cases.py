"""The `aiperf` program: streamed chats and completions, and what it reads of /metrics."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import BUNDLED, KEY, MODEL, URL, case, equal, main, tool, true


def profile(kind: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of six requests, and of the server's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        tool(
            "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind, "--api-key", KEY,
            "--tokenizer", BUNDLED, "--concurrency", 2, "--request-count", 6,
            "--synthetic-input-tokens-mean", 32, "--output-tokens-mean", 16, "--extra-inputs", "ignore_eos:true",
            "--artifact-dir", folder, "--ui", "none", *arguments,
        )  # fmt: skip
        names = ("profile_export_aiperf.json", "server_metrics_export.json")
        report, metrics = (json.loads((Path(folder) / name).read_text()) for name in names)
    return report, metrics


@case
def streamed_chat() -> None:
    report, metrics = profile("chat", "--streaming")
    equal(report["request_count"]["avg"], 6)
    true(report["time_to_first_token"]["avg"] > 0)
    true("vllm:generation_tokens" in json.dumps(metrics), "the server's metrics")


@case
def completions() -> None:
    report, _ = profile("completions", "--use-server-token-count")
    equal((report["request_count"]["avg"], report["output_sequence_length"]["avg"]), (6, 16))


if __name__ == "__main__":
    main()
