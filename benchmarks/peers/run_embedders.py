"""Peers of `benchmarks/embeddings.py`, in an environment of their own: sentence-transformers or ONNX Runtime over one
model, driven by lines.

    arguments   --engine sentence-transformers|onnxruntime --model DIR --threads N --texts FILE
    prints      {"version": "..."} once the engine is loaded
    reads       a line for each run
    prints      {"seconds": [S, CPU seconds of all threads]} after it; of the first run also {"vectors": [...]}

Both sort the texts by length and pad within batches of 32, as sentence-transformers does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 32


def load_sentence_transformers(model: str, threads: int) -> tuple[Callable[[list[str]], Any], str]:
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    engine = sentence_transformers.SentenceTransformer(model, device="cpu")
    return lambda texts: engine.encode(texts, batch_size=BATCH), sentence_transformers.__version__


def load_onnxruntime(model: str, threads: int) -> tuple[Callable[[list[str]], Any], str]:
    """The model in float32, exported here, with all graph optimisations."""
    import numpy as np
    import onnxruntime
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    limit = json.loads((Path(model) / "sentence_bert_config.json").read_text())["max_seq_length"]
    names = ["input_ids", "attention_mask", "token_type_ids"]
    sample = tokenizer(["one text", "another text that is longer"], padding=True, return_tensors="pt")
    network = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.network(input_ids=ids, attention_mask=mask, token_type_ids=types)[0]
            return found

    axes = {name: {0: "batch", 1: "length"} for name in (*names, "last_hidden_state")}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        torch.onnx.export(
            States(),
            tuple(sample[name] for name in names),
            file,
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = np.empty((len(texts), network.config.hidden_size), np.float32)
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            batch = tokenizer(
                [texts[index] for index in chosen], padding=True, truncation=True, max_length=limit, return_tensors="np"
            )
            (states,) = session.run(None, {name: batch[name].astype(np.int64) for name in names})
            mask = batch["attention_mask"][..., None].astype(np.float32)
            pooled = (states * mask).sum(1) / mask.sum(1)
            vectors[chosen] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return encode, onnxruntime.__version__


ENGINES = {"sentence-transformers": load_sentence_transformers, "onnxruntime": load_onnxruntime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not stand between the answers
    texts = json.loads(arguments.texts.read_text())
    encode, version = ENGINES[arguments.engine](arguments.model, arguments.threads)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for number, _ in enumerate(sys.stdin):
        started, used = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        answer: dict[str, Any] = {"seconds": [time.perf_counter() - started, time.process_time() - used]}
        if number == 0:
            answer["vectors"] = vectors.tolist()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
