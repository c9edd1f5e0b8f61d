"""CTranslate2: `Generator.generate_batch`, greedy. Options: those of `ctranslate2.Generator`, such as compute_type.

Requests that want fewer tokens than the longest are computed to the end with the rest, as this engine has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2
from driver import Prepare, Request, Run, serve


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    engine = ctranslate2.Generator(model, device="cpu", inter_threads=1, intra_threads=threads, **options)
    words = json.loads((Path(model) / "vocabulary.json").read_text())

    def prepare(requests: list[Request]) -> Run:
        prompts = [[words[token] for token in each["prompt_token_ids"]] for each in requests]
        wanted = [each["max_tokens"] for each in requests]

        def run() -> list[int]:
            results = engine.generate_batch(
                prompts,
                max_length=max(wanted),
                min_length=max(wanted),
                include_prompt_in_result=False,
                beam_size=1,
                sampling_topk=1,
            )
            return [min(len(each.sequences_ids[0]), limit) for each, limit in zip(results, wanted, strict=True)]

        return run

    return prepare, ctranslate2.__version__


if __name__ == "__main__":
    serve(load)
