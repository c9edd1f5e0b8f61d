"""What the control plane costs: schedule + update + stats per step, with an executor that computes nothing.

    python benchmarks/control_plane.py [--json FILE] [--requests 100000]

Two questions. How long does a step take in the scheduler and the KV manager for 256 and 1,024 running sequences
(aim: 1 ms and 4 ms)? And does that stay flat, in time and in memory, as 100,000 finished requests pile up?
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from quire.config.scheduler import SchedulerConfig
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import AttentionSpec
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan, StepResult


def make_scheduler(num_seqs: int, num_blocks: int) -> Scheduler:
    spec = AttentionSpec(num_kv_heads=8, key_dim=128, value_dim=128, dtype_bytes=2)
    groups, layers_per_group = group_layers([spec] * 32, 16)
    layout = KVCacheLayout(block_size=16, num_blocks=num_blocks, groups=groups, layers_per_group=layers_per_group)
    config = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_seqs, max_prefill_chunk=None, queue_depth=1)
    return Scheduler(config, KVCacheManager(layout, enable_prefix_caching=True))


def requests(input_len: int, output_len: int) -> Iterator[EngineRequest]:
    """Endless requests whose prompts differ from the first token on."""
    for number in itertools.count():
        yield EngineRequest(
            request_id=str(number),
            prompt_token_ids=[number % 50_000, number // 50_000, *range(2, input_len)],
            params=SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True),
            max_tokens=output_len,
            seed=number,
        )


def fake_result(plan: StepPlan, token: int) -> StepResult:
    return StepResult(plan.step_id, [[token % 50_000] for _ in plan.sample_seq_ids])


def one_step(scheduler: Scheduler, token: int) -> tuple[float, float, float, int]:
    """(seconds in schedule, seconds in update, seconds for the snapshot of the statistics, sequences that finished)."""
    started = time.perf_counter()
    plan = scheduler.schedule(0.0)
    planned = time.perf_counter()
    assert plan is not None, "the queue ran dry"
    result = fake_result(plan, token)
    resumed = time.perf_counter()
    updates = scheduler.update(result, 0.0)
    updated = time.perf_counter()
    scheduler.stats()
    done = time.perf_counter()
    num_finished = sum(update.finish_reason is not None for update in updates)
    return planned - started, updated - resumed, done - updated, num_finished


def measure_steps(num_seqs: int, steps: int = 300) -> dict[str, float]:
    """Steady decoding of `num_seqs` sequences, a sixteenth of which start a new block in each step."""
    scheduler = make_scheduler(num_seqs, num_blocks=num_seqs * 40)
    source = requests(input_len=64, output_len=512)
    for offset in range(num_seqs):
        scheduler.add_request(next(source), 0.0)
        if offset % max(1, num_seqs // 16) == 0:
            one_step(scheduler, 1)
    while scheduler.stats().num_waiting:
        one_step(scheduler, 1)
    samples = [one_step(scheduler, step)[:3] for step in range(steps)]
    schedule, update, stats = (statistics.median(column) * 1e3 for column in zip(*samples, strict=True))
    return {
        "sequences": num_seqs,
        "schedule_ms": schedule,
        "update_ms": update,
        "stats_ms": stats,
        "step_ms": schedule + update + stats,
    }


def measure_soak(num_requests: int, num_seqs: int = 256) -> list[dict[str, float]]:
    """Keep `num_seqs` sequences running until `num_requests` have finished; one line per tenth."""
    scheduler = make_scheduler(num_seqs, num_blocks=num_seqs * 8)
    source = requests(input_len=40, output_len=24)
    rows, finished, times = [], 0, []
    for _ in range(2 * num_seqs):
        scheduler.add_request(next(source), 0.0)
    while finished < num_requests:
        schedule, update, stats, ended = one_step(scheduler, finished)
        times.append(schedule + update + stats)
        for _ in range(ended):
            scheduler.add_request(next(source), 0.0)
        finished += ended
        if finished >= num_requests * (len(rows) + 1) / 10:
            gc.collect()
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            rows.append({"finished": finished, "step_ms": statistics.median(times) * 1e3, "peak_rss_mib": peak_mib})
            times = []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="finished requests of the soak")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    gc.freeze()
    steps = [measure_steps(num_seqs) for num_seqs in (1, 64, 256, 1024)]
    print(f"{'sequences':>10} {'schedule ms':>12} {'update ms':>10} {'stats ms':>9} {'step ms':>8} {'us/sequence':>12}")
    for row in steps:
        each = row["step_ms"] / row["sequences"] * 1e3
        print(
            f"{row['sequences']:>10} {row['schedule_ms']:>12.3f} {row['update_ms']:>10.3f} "
            f"{row['stats_ms']:>9.3f} {row['step_ms']:>8.3f} {each:>12.2f}"
        )
    soak = measure_soak(arguments.requests)
    print(f"\n{'finished':>10} {'step ms':>8} {'peak RSS MiB':>13}")
    for row in soak:
        print(f"{row['finished']:>10} {row['step_ms']:>8.3f} {row['peak_rss_mib']:>13.1f}")
    print(f"\nlast tenth over second tenth: time {soak[-1]['step_ms'] / soak[1]['step_ms']:.2f}", end="")
    print(f", memory {soak[-1]['peak_rss_mib'] / soak[1]['peak_rss_mib']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"steps": steps, "soak": soak}, indent=1) + "\n")


if __name__ == "__main__":
    main()
