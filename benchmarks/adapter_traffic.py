"""Many adapters, few slots: python -m benchmarks.adapter_traffic [--adapters 1000] [--slots 64] [--rate 20]

The bundled model with random adapters of rank 8 that lie on disk. Requests arrive at random times (Poisson), and choose
adapters by Zipf's law: the k-th most popular has a share proportional to 1 / k. Printed are the share of requests whose
adapter lay in a slot, beside that of a plain LRU cache over the same requests, seconds until the first token (p50, p95,
p99) of these and of the others, and of requests at the same times without adapters, and what `quire simulate` predicts
for the same requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.adapters import write_adapter
from quire import AsyncLLM, LoRARequest, SamplingParams
from quire.config.adapters import AdaptersConfig
from quire.config.hf_config import BUNDLED_DIRECTORIES
from quire.config.options import BUNDLED_MODEL
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.replica import EngineSettings, Observer, Record, simulate
from quire.simulator.shape import find_shape
from quire.simulator.trace import TraceRequest

RANK, PROMPT, TOKENS = 8, 24, 16
NUM_SEQS, HARDWARE = 64, "cpu-2-core-avx512"


def write_adapters(directory: Path, config: dict[str, int], count: int) -> list[LoRARequest]:
    """Adapters of the projections of attention."""
    size, head, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
    modules = {
        "self_attn.q_proj": (config["num_attention_heads"] * head, size),
        "self_attn.v_proj": (config["num_key_value_heads"] * head, size),
    }
    paths = [
        write_adapter(directory / f"a{number}", number, modules, num_layers=layers, rank=RANK)
        for number in range(count)
    ]
    return [LoRARequest(path.name, 1 + number, str(path)) for number, path in enumerate(paths)]


def lru_hits(chosen: Sequence[int], slots: int) -> list[bool]:
    """True for each request whose adapter lies in a cache that drops the one used least recently."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for each in chosen:
        hits.append(each in held)
        held[each] = held.pop(each, None)
        if len(held) > slots:
            held.popitem(last=False)
    return hits


async def run(
    engine: AsyncLLM, times: Sequence[float], adapters: Sequence[LoRARequest | None], name: str
) -> list[float]:
    """Seconds until the first token of each request. times: of arrival."""
    began, params = time.perf_counter(), SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def one(number: int) -> float:
        await asyncio.sleep(times[number] - (time.perf_counter() - began))
        sent, first = time.perf_counter(), 0.0
        prompt = {"prompt_token_ids": [1 + (number * 31 + place * 7) % 4000 for place in range(PROMPT)]}
        async for _ in engine.generate(prompt, params, f"{name}-{number}", lora_request=adapters[number]):
            first = first or time.perf_counter() - sent
        return first

    return await asyncio.gather(*map(one, range(len(times))))


def simulated(
    model: Path, slots: int, times: Sequence[float], chosen: Sequence[int], load_seconds: float
) -> tuple[float, dict[str, list[float]]]:
    """Hit rate, and first tokens of hits and misses. load_seconds: of an adapter."""
    records: list[Record] = []
    settings = EngineSettings(
        max_num_seqs=NUM_SEQS,
        queue_depth=1,
        enable_prefix_caching=False,
        adapters=AdaptersConfig(max_running=slots, max_rank=RANK, num_slots=slots),
        adapter_load_seconds=load_seconds,
    )
    requests = [
        TraceRequest(arrival, PROMPT, TOKENS, adapter=str(adapter))
        for arrival, adapter in zip(times, chosen, strict=True)
    ]
    cost = CostModel(find_shape(str(model)), find(HARDWARE))
    metrics = simulate(requests, cost, settings, observer=Observer(records.append))
    return metrics.adapter_hit_rate, {
        "simulated hits": quantiles([record.ttft for record in records if record.is_loaded]),
        "simulated misses": quantiles([record.ttft for record in records if not record.is_loaded]),
    }


def quantiles(seconds: Sequence[float]) -> list[float]:
    ordered = sorted(seconds)
    return [round(1e3 * ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.95, 0.99)] if ordered else []


async def measured(
    arguments: argparse.Namespace, model: Path, adapters: list[LoRARequest]
) -> tuple[dict[str, object], dict[str, list[float]]]:
    rng = random.Random(1)
    weights = [1 / (1 + rank) for rank in range(len(adapters))]
    chosen = rng.choices(range(len(adapters)), weights, k=arguments.requests)
    times, now = [], 0.0
    for _ in chosen:
        now += rng.expovariate(arguments.rate)
        times.append(now)
    engine = AsyncLLM(
        model=str(model),
        enable_lora=True,
        max_loras=arguments.slots,
        max_cpu_loras=arguments.slots,
        max_lora_rank=RANK,
        max_num_seqs=NUM_SEQS,
        enable_prefix_caching=False,
    )
    try:
        await asyncio.to_thread(lambda: engine.ready)
        without = await run(engine, times, [None] * len(times), "plain")
        seconds = await run(engine, times, [adapters[each] for each in chosen], "adapted")
        loads = (await engine.stats()).adapter_loads_total
    finally:
        engine.shutdown()
    hits = lru_hits(chosen, arguments.slots)
    of_hits = [each for each, hit in zip(seconds, hits, strict=True) if hit]
    of_misses = [each for each, hit in zip(seconds, hits, strict=True) if not hit]
    load_seconds = max(1e-4, median(of_misses) - median(of_hits or of_misses))
    predicted, first_tokens = simulated(model, arguments.slots, times, chosen, load_seconds)
    facts = {
        "adapters": len(adapters),
        "slots": arguments.slots,
        "requests": len(chosen),
        "rate": arguments.rate,
        "distinct": len(set(chosen)),
        "hit_rate": round(1 - loads / len(chosen), 4),
        "lru_hit_rate": round(sum(hits) / len(hits), 4),
        "simulated_hit_rate": round(predicted, 4),
        "load_ms": round(1e3 * load_seconds, 1),
    }
    return facts, {
        "without adapters": quantiles(without),
        "hits": quantiles(of_hits),
        "misses": quantiles(of_misses),
        **first_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    arguments = parser.parse_args()
    model = BUNDLED_DIRECTORIES[BUNDLED_MODEL]
    with tempfile.TemporaryDirectory() as scratch:
        config = json.loads((model / "config.json").read_text())
        adapters = write_adapters(Path(scratch), config, arguments.adapters)
        facts, first_token_ms = asyncio.run(measured(arguments, model, adapters))
    print(
        f"hits: {facts['hit_rate']:.1%} (an LRU cache {facts['lru_hit_rate']:.1%}, simulated "
        f"{facts['simulated_hit_rate']:.1%} with loads of {facts['load_ms']} ms)"
    )
    for name, row in first_token_ms.items():
        print(f"{name}: first token after {' / '.join(map(str, row))} ms (p50, p95, p99)")
    print(json.dumps({**facts, "first_token_ms": first_token_ms}))


if __name__ == "__main__":
    main()
