"""The `guidellm` program: synthetic loads over chat completions and completions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness import BUNDLED, KEY, MODEL, URL, case, equal, main, tool


def run(profile: str, request_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        tool(
            "guidellm", "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={request_format}",
            "--profile", profile,
            "--constraint", "kind=max_requests,count=6",
            "--tokenizer", f"kind=huggingface_auto,model={BUNDLED}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--output", f"kind=json,path={path}",
            HF_HUB_OFFLINE="1",
        )  # fmt: skip
        [benchmark] = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    equal((totals["successful"], totals["errored"]), (6, 0))
    equal(benchmark["metrics"]["output_token_count"]["successful"]["mean"], 16)


@case
def concurrent_chat() -> None:
    run("kind=concurrent,streams=2", "/v1/chat/completions")


@case
def rate_of_completions() -> None:
    run("kind=constant,rate=5", "/v1/completions")


if __name__ == "__main__":
    main()
