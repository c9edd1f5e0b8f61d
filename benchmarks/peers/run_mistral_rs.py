"""mistral.rs, through its Python API: a stream for each request, all sent before the first is read.

Options: dtype (F32, BF16, F16), in_situ_quant (Q8_0, Q4_0, Q4K ...), other options of `mistralrs.Runner`. It takes text
alone, so each id becomes one of 36 characters that the tokenizer of `make_models.py` keeps apart, and the run fails
where the engine counts other lengths than were asked for.
"""

from __future__ import annotations

import json
import os
import string
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from driver import Prepare, Request, Run, serve

CHARACTERS = string.ascii_uppercase + string.digits
ARCHITECTURES = {"llama": "Llama", "qwen3": "Qwen3"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_SEQUENCES = 64


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # before the library starts its pool
    from mistralrs import Architecture, ChatCompletionRequest, ModelDType, Runner, Which

    family = json.loads((Path(model) / "config.json").read_text())["model_type"]
    options = {"max_seqs": MAX_SEQUENCES, **options}
    which = Which.Plain(
        model_id=model,
        arch=getattr(Architecture, ARCHITECTURES[family]),
        dtype=getattr(ModelDType, options.pop("dtype", "F32")),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        engine = Runner(which=which, jinja_explicit=template.name, **options)

    def prepare(requests: list[Request]) -> Run:
        asked = [
            ChatCompletionRequest(
                messages=[
                    {"role": "user", "content": "".join(CHARACTERS[token % 36] for token in each["prompt_token_ids"])}
                ],
                model="default",
                max_tokens=each["max_tokens"],
                temperature=0.0,
                ignore_eos=True,
                stream=True,
            )
            for each in requests
        ]

        def run() -> list[int]:
            usages = []
            for stream in [engine.send_chat_completion_request(each) for each in asked]:
                *_, last = stream
                usages.append(last.usage)
            lengths = [len(each["prompt_token_ids"]) for each in requests]
            if [usage.prompt_tokens for usage in usages] != lengths:
                raise RuntimeError(f"prompts of {lengths} tokens became {[each.prompt_tokens for each in usages]}")
            return [usage.completion_tokens for usage in usages]

        return run

    return prepare, version("mistralrs")


if __name__ == "__main__":
    serve(load)
