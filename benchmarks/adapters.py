"""Cost of adapters: python -m benchmarks.adapters [--device cuda] [--quantization w8a8] [--rounds 5]

Qwen3-0.6B's shape with dummy weights and random adapters of rank 16. One engine runs the same requests with adapters
and without, in turns; steps without adapters run the program that has none. Each row of the table is a target: 16
streams with 8 adapters on all projections or on those of attention, one stream, a prompt of 1,024 tokens. Printed is
the median of the turns' ratios, in CPU seconds of the process, which other processes disturb less, and in seconds. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams

HEADS, KEY_HEADS, HEAD, SIZE, INNER, LAYERS = 16, 8, 128, 1024, 3072, 28
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD, SIZE),
    "self_attn.k_proj": (KEY_HEADS * HEAD, SIZE),
    "self_attn.v_proj": (KEY_HEADS * HEAD, SIZE),
    "self_attn.o_proj": (SIZE, HEADS * HEAD),
}
ALL = {**ATTENTION, "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE), "mlp.down_proj": (SIZE, INNER)}
RANK, NUM_ADAPTERS, STREAMS = 16, 8, 16


class Case(NamedTuple):
    """One row of the table. adapters: first and number of those that the streams have in turns. aims: percent slower at
    most, in 16 and in 8 bits (None: no aim)."""

    name: str
    streams: int
    prompt: int
    tokens: int
    adapters: tuple[int, int]
    aims: tuple[float, float] | None


CASES = (
    Case("16 streams, 8 adapters", STREAMS, 4, 32, (0, NUM_ADAPTERS), (18, 35)),
    Case("16 streams, 8 adapters of q, k, v, o", STREAMS, 4, 32, (NUM_ADAPTERS, NUM_ADAPTERS), (8, 16)),
    Case("one stream", 1, 4, 32, (0, 1), (3.5, 6)),
    Case("a prompt of 1,024", 1, 1024, 1, (0, 1), (4, 8)),
)


def write_adapter(
    directory: Path, seed: int, modules: dict[str, tuple[int, int]], *, num_layers: int = LAYERS, rank: int = RANK
) -> Path:
    """modules: (outputs, inputs) of each, by its name in a layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (outputs, inputs) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            a, b = (torch.randn(*size, generator=generator) * 0.02 for size in ((rank, inputs), (outputs, rank)))
            tensors |= {f"{prefix}.lora_A.weight": a.bfloat16(), f"{prefix}.lora_B.weight": b.bfloat16()}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": None, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def run(llm: LLM, case: Case, adapters: list[LoRARequest] | None) -> tuple[float, float]:
    """CPU seconds of all threads of the process, and seconds."""
    prompts = [
        {"prompt_token_ids": [(7 * stream + 11 * place) % 40_000 for place in range(case.prompt)]}
        for stream in range(case.streams)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True, detokenize=False)
    which = None if adapters is None else [adapters[stream % len(adapters)] for stream in range(case.streams)]
    began, used = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora_request=which)
    return time.process_time() - used, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default=None, help="of the base (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where CPU seconds are the host's alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="of the engine (default: its own choice)")
    parser.add_argument("--cases", default="", help="parts of the names of the cases to run, with commas between")
    arguments = parser.parse_args()
    wanted = arguments.cases.split(",")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(SHAPE))
        paths = [
            write_adapter(Path(scratch) / str(number), number, ALL if number < NUM_ADAPTERS else ATTENTION)
            for number in range(2 * NUM_ADAPTERS)
        ]
        requests = [LoRARequest(path.name, 1 + number, str(path)) for number, path in enumerate(paths)]
        with LLM(
            str(base),
            device=arguments.device,
            load_format="dummy",
            dtype="bfloat16",
            quantization=arguments.quantization,
            skip_tokenizer_init=True,
            num_threads=arguments.threads,
            max_model_len=2048,
            max_num_seqs=STREAMS,
            kv_cache_memory="512MiB",
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=NUM_ADAPTERS,
            max_cpu_loras=2 * NUM_ADAPTERS,
            max_lora_rank=RANK,
        ) as llm:
            for case in (case for case in CASES if any(part in case.name for part in wanted)):
                first, count = case.adapters
                adapters, ratios = requests[first : first + count], []
                for number in range(arguments.rounds + 1):
                    with_adapters, without = run(llm, case, adapters), run(llm, case, None)
                    if number:  # the first round loads and warms up
                        ratios.append([own / plain for own, plain in zip(with_adapters, without, strict=True)])
                cpu, seconds = (100 * (statistics.median(column) - 1) for column in zip(*ratios, strict=True))
                aim = None if case.aims is None else case.aims[arguments.quantization is not None]
                results.append({"case": case.name, "aim": aim, "cpu_seconds": cpu, "seconds": seconds})
                print(f"{case.name:>38}: {cpu:5.1f} % more CPU seconds, {seconds:5.1f} % more seconds; aim {aim} %")
    weights = arguments.quantization or "bfloat16"
    print(json.dumps({"device": arguments.device, "weights": weights, "results": results}))


if __name__ == "__main__":
    main()
