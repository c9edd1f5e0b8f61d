"""What rounded weights and activations cost in quality: the perplexity of held-out text, beside that of float32.

    python benchmarks/perplexity.py [--quantization bf16,w16a16,int8,int4,w8a8,w4a8] [--simulate] [--tokens 1024]
        [--json FILE]

The text is what the bundled model never saw: the files of the standard library that training/corpus.py holds out, the
first tokens of each. The engine itself reads it, through `prompt_logprobs`, so its kernels are part of the figure.
bf16: weights and KV cache are stored in bfloat16; w16a16: and multiplied in it (matmul_precision). int8a16, int4a16 and
the like: activations are rounded to bfloat16, which AMX does. With --simulate the
weights are rounded and stored back as float32, which leaves the numbers' format alone to blame; then `int4:32`,
`int4:64` and `int4:128` name group sizes, and the vocabulary's matrix is rounded to 8 bits in all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.hf_config import find_model
from quire.config.options import BUNDLED_MODEL
from quire.kernels.cpu import _native
from quire.quantization.quantize import quantize_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from corpus import split_corpus

BASELINE = "float32"
STORED_IN_BFLOAT16 = {"bf16": "float32", "w16a16": "bfloat16"}
"""Not quantised: the precision of products by name."""
ROUNDED = "a16"
"""Ends the name of a quantisation whose activations are rounded to bfloat16."""
SIMULATED_GROUP_SIZE = 64
VOCABULARY_MATRICES = ("embed_tokens.weight", "lm_head.weight")


def held_out_prompts(llm: LLM, num_tokens: int) -> list[list[int]]:
    """The first tokens of each held-out file, led by the tokenizer's own first token."""
    texts = [file.text for file in split_corpus()[1]]
    encoded = [llm.get_tokenizer().encode(text)[:num_tokens] for text in texts]
    return [tokens for tokens in encoded if len(tokens) > 1]


def perplexity(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    nats, count = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            nats -= entry[token].logprob
            count += 1
    return math.exp(nats / count)


@contextmanager
def simulated(model: str, quantization: str) -> Iterator[Path]:
    """A copy of the model's directory whose matrices went through integers and back."""
    method, _, group = quantization.partition(":")
    if method not in ("int8", "int4"):
        sys.exit(f"{quantization} cannot be simulated by rounding weights (int8, int4, int4:32, int4:64, int4:128 can)")
    group_size = int(group or SIMULATED_GROUP_SIZE) if method == "int4" else None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file in find_model(model, revision=None, config_only=False).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, directory)
                continue
            tensors = load_file(file)
            for tensor_name, tensor in tensors.items():
                if tensor.dim() == 2:
                    narrow = group_size is not None and not tensor_name.endswith(VOCABULARY_MATRICES)
                    bits, size = (4, group_size) if narrow else (8, None)
                    tensors[tensor_name] = quantize_rows(tensor, bits, size, name=tensor_name).dequantize()
            save_file(tensors, directory / file.name)
        yield directory


def measure(model: str, quantization: str, prompts: Sequence[list[int]], simulate: bool) -> float:
    if not simulate:
        method = quantization.removesuffix(ROUNDED)
        options: dict[str, Any] = {"dtype": "float32", "quantization": method}
        if method != quantization:
            options["matmul_precision"] = "bfloat16"
        if quantization in STORED_IN_BFLOAT16:
            options = {"dtype": "bfloat16", "matmul_precision": STORED_IN_BFLOAT16[quantization]}
        with LLM(model, enable_prefix_caching=False, **options) as llm:
            return perplexity(llm, prompts)
    with simulated(model, quantization) as directory, LLM(directory, dtype="float32") as llm:
        return perplexity(llm, prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", help="names, separated by commas (default: all that apply)")
    parser.add_argument("--simulate", action="store_true", help="round the weights, compute in float32")
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens read of each file")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    usual = "int8,int4:32,int4:64,int4:128" if arguments.simulate else "bf16,int8,w8a8,int4,w4a8"
    if not arguments.simulate and _native.has_bf16_products("auto"):
        usual = f"w16a16,{usual}"
    with LLM(arguments.model, dtype="float32", enable_prefix_caching=False) as llm:
        prompts = held_out_prompts(llm, arguments.tokens)
        print(f"{len(prompts)} files, {sum(len(prompt) - 1 for prompt in prompts)} tokens")
        print(f"{'weights':<12}{'perplexity':>11}{'change':>10}{'seconds':>9}", flush=True)
        rows: list[dict[str, Any]] = []
        for name in (BASELINE, *(arguments.quantization or usual).split(",")):
            started = time.perf_counter()
            value = (
                perplexity(llm, prompts)
                if name == BASELINE
                else measure(arguments.model, name, prompts, arguments.simulate)
            )
            change = value / (rows[0]["perplexity"] if rows else value) - 1
            rows.append({"weights": name, "perplexity": value, "change": change})
            print(f"{name:<12}{value:>11.4f}{change:>+10.2%}{time.perf_counter() - started:>9.1f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
