"""The `lm-eval` program, with tasks of its own formats over documents that are made here."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import BUNDLED, KEY, MODEL, OPENAI_URL, case, equal, main, tool, true

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {folder}/documents.json
test_split: train
doc_to_text: "{{{{question}}}}"
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: ["(self)", " ()() )("]
doc_to_target: 0
metric_list: [{metric: acc}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
"""


def evaluate(model: str, route: str, task: str, *arguments: str, **more: object) -> dict[str, Any]:
    """The task's results."""
    with tempfile.TemporaryDirectory() as folder:
        documents = [{"question": "class A:\\n    def f", "answer": "x"}, {"question": "def g", "answer": "y"}]
        (Path(folder) / "documents.json").write_text("\n".join(map(json.dumps, documents)))
        (Path(folder) / "task.yaml").write_text(TASK.format(name="local", folder=folder) + task)
        options = {"base_url": OPENAI_URL + route, "model": MODEL, "num_concurrent": 2, **more}
        tool(
            "lm_eval", "run", "--model", model, "--include_path", folder, "--tasks", "local",
            "--model_args", ",".join(f"{name}={value}" for name, value in options.items()),
            "--output_path", folder + "/results", *arguments,
            HF_HUB_OFFLINE="1", OPENAI_API_KEY=KEY, HF_HOME=folder,
        )  # fmt: skip
        [path] = Path(folder).rglob("results_*.json")
        found: dict[str, Any] = json.loads(path.read_text())["results"]["local"]
        return found


def completions(task: str) -> dict[str, Any]:
    return evaluate("local-completions", "/completions", task, tokenizer_backend="huggingface", tokenizer=str(BUNDLED))


@case
def completions_generate() -> None:
    equal(completions(GENERATE)["exact_match,none"], 0)


@case
def completions_multiple_choice() -> None:
    """Log-likelihoods of continuations: echo of token ids with logprobs."""
    equal(completions(CHOICE)["acc,none"], 1)


@case
def completions_perplexity() -> None:
    true(1 < completions(ROLLING)["byte_perplexity,none"] < 100, "the perplexity")


@case
def chat_generate() -> None:
    found = evaluate("local-chat-completions", "/chat/completions", GENERATE, "--apply_chat_template")
    equal(found["exact_match,none"], 0)


if __name__ == "__main__":
    main()
