"""How near one stream comes to the weights' bandwidth: python -m benchmarks.one_stream MODEL [--quantization int8] ...

Tokens per second of one stream (128 tokens in, 64 out; the tokens after the first count) in turns with the
streaming-read loop of `make bench-kernels`; the limit is the bandwidth over the bytes of weights that every token
reads. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.kernels.run import READ
from benchmarks.kernels.subjects.machine import Machine
from quire import LLM, SamplingParams
from quire.cli.memory_plan import stored_weight_bytes
from quire.config.options import EngineOptions
from quire.config.resolve import resolve

PROMPT, NEW = 128, 64


def seconds(llm: LLM, first_token: int, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompt = [(first_token + i) % 1000 for i in range(PROMPT)]
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    options = {"model": arguments.model, "quantization": arguments.quantization, "dtype": arguments.dtype}
    config = resolve(EngineOptions.from_keywords(options))
    shape = config.model.resolved_shape()
    share = 1 - shape.looked_up_parameters / shape.parameters()
    weight_bytes = stored_weight_bytes(config.model, shape) * share
    read = Machine(config.device.cpu_isa, config.device.num_threads).limits()[READ]
    bandwidths, rates = [], []
    sizes = {"max_model_len": 1024, "kv_cache_memory": "256MiB"}
    with LLM(**options, **sizes, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        for round_number in range(arguments.rounds + 1):
            started = time.perf_counter()
            num_bytes = sum(read() for _ in range(8))
            bandwidths.append(num_bytes / (time.perf_counter() - started))
            alone = seconds(llm, round_number, 1)
            rates.append((NEW - 1) / (seconds(llm, round_number, NEW) - alone))
    limits = [bandwidth / weight_bytes for bandwidth in bandwidths]
    shares = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    print(
        f"{weight_bytes / 1e6:.0f} MB of weights a token; read {statistics.median(bandwidths[1:]) / 1e9:.1f} GB/s; "
        f"{statistics.median(rates[1:]):.1f} tokens/s of at most {statistics.median(limits[1:]):.1f}: "
        f"{statistics.median(shares[1:]):.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
