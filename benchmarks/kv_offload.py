"""The KV connector below the device: bytes a second to and from disk, and when loading a prefix beats computing it.

    python benchmarks/kv_offload.py [--model M] [--dtype bfloat16] [--directory DIR] [--repeats 5] [--json FILE]

First the store alone: blocks of several sizes are written and read back (from the page cache, as after a restart of
the engine; --drop-cache asks the system to forget them first, as after a restart of the machine), and checksums alone,
which bound both. Then an engine: prompts of growing length are computed, and loaded from disk by a fresh engine; each
time is that of the first token, the order of the two changes from round to round, and the ratio is the median of the
ratios of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.utils.sizes import format_bytes
from quire.worker.kv_connector.block_file import BlockFileLayout
from quire.worker.kv_connector.disk_store import DiskStore

PAGES = 16
BLOCK_BYTES = (16 << 10, 64 << 10, 512 << 10, 2 << 20)
STORE_BYTES = 64 << 20
"""Moved at each size, in at most ..."""
STORE_BLOCKS = 512
LENGTHS = (32, 64, 128, 256, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drop-cache", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="quire-kv-") as name:
        result = {
            "store": [time_store(Path(name) / str(size), size, drop=options.drop_cache) for size in BLOCK_BYTES],
            "engine": time_engine(Path(name) / "engine", options.model, options.dtype, options.repeats),
        }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


def time_store(directory: Path, block_bytes: int, *, drop: bool) -> dict[str, float]:
    """Bytes a second of storing, loading and the checksum alone, over the engine's own path and threads."""
    count = min(STORE_BLOCKS, STORE_BYTES // block_bytes)
    layout = BlockFileLayout(bytes(32), PAGES, block_bytes // PAGES)
    memory = [[bytearray(os.urandom(layout.page_bytes)) for _ in range(PAGES)] for _ in range(count)]
    hashes = [number.to_bytes(32, "big") for number in range(count)]
    store = DiskStore(directory, 2 * count * layout.file_bytes, layout, memory.__getitem__)
    total = count * block_bytes

    def ended(start: Callable[[int], None], names: tuple[str, ...]) -> float:
        began = time.perf_counter()
        for block in range(count):
            start(block)
        done = 0
        while done < count:
            store.wait(1.0)
            report = store.take_report()
            if report is not None:
                assert not report.failed
                assert not report.num_store_failures
                done += sum(len(getattr(report, name)) for name in names)
        return total / (time.perf_counter() - began)

    stored = ended(lambda block: store.store_block(block, 0, hashes[block]), ("released",))
    if drop:
        _drop_from_page_cache(directory)
    loaded = ended(lambda block: store.load_block(0, hashes[block], block), ("loaded",))
    began = time.perf_counter()
    for pages in memory:
        for page in pages:
            zlib.crc32(page)
    checksum = total / (time.perf_counter() - began)
    store.close(10.0)
    return {"block_bytes": block_bytes, "stored": stored, "loaded": loaded, "checksum": checksum}


def _drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def time_engine(directory: Path, model: str, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """For each length: seconds to the first token, computed and with the prompt's blocks from disk."""
    engine = {"dtype": dtype, "kv_cache_memory": "1GiB", "swap_space": "1GiB", "skip_tokenizer_init": True}
    offload = {**engine, "kv_offload_dir": directory, "kv_offload_size": "4GiB"}
    chance = random.Random(0)
    with LLM(model, **engine | {"swap_space": None}) as plain:
        prompts = {
            (length, turn): [chance.randrange(3, 250) for _ in range(length + 1)]
            for length in LENGTHS
            for turn in range(repeats)
        }
        with LLM(model, **offload) as writer:
            for prompt in prompts.values():
                first_token(writer, prompt)
            block_bytes = writer.stats()["offload_stored_bytes_total"] // writer.stats()["offload_stored_blocks_total"]  # type: ignore[operator]
        warm_up = [chance.randrange(3, 250) for _ in range(200)]
        rows = []
        with LLM(model, **offload) as reader:
            for llm in (plain, reader):
                first_token(llm, warm_up)
            for length in LENGTHS:
                seconds: dict[str, list[float]] = {"computed": [], "disk": []}
                for turn in range(repeats):
                    prompt = prompts[length, turn]
                    pair = [("computed", plain), ("disk", reader)]
                    for name, llm in pair if turn % 2 else reversed(pair):
                        seconds[name].append(first_token(llm, prompt))
                hits = reader.stats()
                ratios = [disk / computed for disk, computed in zip(seconds["disk"], seconds["computed"], strict=True)]
                rows.append(
                    {
                        "tokens": length,
                        "block_bytes": block_bytes,
                        "computed": statistics.median(seconds["computed"]),
                        "disk": statistics.median(seconds["disk"]),
                        "ratio": statistics.median(ratios),
                        "disk_hit_blocks": hits["disk_cache_hit_blocks_total"],
                        "load_failures": hits["offload_load_failures_total"],
                    }
                )
    return rows


def first_token(llm: LLM, prompt: list[int]) -> float:
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - began


def show(result: dict[str, Any]) -> None:
    print(f"{'block':>10} {'stored/s':>12} {'loaded/s':>12} {'checksum/s':>12} {'load':>10}")
    for row in result["store"]:
        rates = "".join(f"{format_bytes(row[name]):>13}" for name in ("stored", "loaded", "checksum"))
        micros = 1e6 * row["block_bytes"] / row["loaded"]
        print(f"{format_bytes(row['block_bytes']):>10}{rates} {micros:>7.0f} us")
    print(f"\n{'tokens':>7} {'block':>10} {'computed':>10} {'from disk':>10} {'ratio':>7}")
    for row in result["engine"]:
        print(
            f"{row['tokens']:>7} {format_bytes(row['block_bytes']):>10} {1e3 * row['computed']:>7.1f} ms "
            f"{1e3 * row['disk']:>7.1f} ms {row['ratio']:>7.2f}"
        )


if __name__ == "__main__":
    main()
