"""How fast Transformers' modelling code is beside Quire's own file of the same model: python -m benchmarks.fallback

A LLaMA of SmolLM2-135M's shape with dummy weights, once with `model_impl="quire"` and once with "transformers", both in
this process and in turns: `--streams` sequences of `--tokens` tokens behind prompts of `--prompt`. Printed are the
medians of seconds and of this process's CPU seconds, which other processes disturb less, and how much of the own file's
speed the other has; its aim is 60 % at 16 streams. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from quire import LLM, SamplingParams

IMPLEMENTATIONS = ("quire", "transformers")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def start(directory: Path, impl: str, arguments: argparse.Namespace) -> LLM:
    return LLM(
        str(directory),
        model_impl=impl,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_threads=arguments.threads,
        max_model_len=arguments.prompt + arguments.tokens,
        max_num_seqs=arguments.streams,
        enable_prefix_caching=False,
    )


def run(llm: LLM, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads of the process."""
    prompts = [
        {"prompt_token_ids": [(7 * stream + 11 * place) % 40_000 for place in range(arguments.prompt)]}
        for stream in range(arguments.streams)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False)
    began, used = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == arguments.tokens for output in outputs), "no stream ends early"
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens behind it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="of the engine (default: its own choice)")
    arguments = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {impl: [] for impl in IMPLEMENTATIONS}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(SHAPE))
        engines = {impl: start(Path(scratch), impl, arguments) for impl in IMPLEMENTATIONS}
        try:
            for number in range(arguments.rounds + 1):
                for impl, llm in engines.items():
                    measured = run(llm, arguments)
                    if number:  # the first round warms up
                        taken[impl].append(measured)
        finally:
            for llm in engines.values():
                llm.shutdown()
    medians = {impl: [statistics.median(column) for column in zip(*rows, strict=True)] for impl, rows in taken.items()}
    for impl, (seconds, cpu) in medians.items():
        print(f"{impl:>13}: {seconds:.3f} s, {cpu:.3f} CPU s")
    shares = [own / other for own, other in zip(*medians.values(), strict=True)]
    print(f"through Transformers: {shares[0]:.0%} of the own file's speed, {shares[1]:.0%} by CPU seconds")
    print(json.dumps({"medians": medians, "share": shares[0], "share_of_cpu_seconds": shares[1]}))


if __name__ == "__main__":
    main()
