"""Encode pictures by Quire and by llama.cpp's mtmd, in turns: Qwen3-VL-2B's tower, random weights in bfloat16.

    python -m benchmarks.peers.towers [--threads 2] [--rounds 5] [--sides 448 1024]

Prints the medians of seconds and of processor seconds, and peer over Quire. llama.cpp is installed by
`python benchmarks/peers/install.py llama.cpp`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_vision
from quire.models.vision import VisionEncoder
from quire.parallel.single import SINGLE_RANK

HERE = Path(__file__).parent
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
"""Tower of Qwen3-VL-2B."""
TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}


def open_tower(folder: Path, threads: int) -> VisionEncoder:
    names = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151_655}
    (folder / "config.json").write_text(json.dumps({**names, "text_config": TEXT, "vision_config": VISION}))
    config = load_model_config(str(folder), dtype="bfloat16", max_model_len=None, revision=None, config_only=True)
    return load_vision(config, LoadConfig("dummy", 0), SINGLE_RANK, NativeRuntime("auto", threads, "auto"))


def encode(tower: VisionEncoder, side: int) -> tuple[float, float, int]:
    """(seconds, processor seconds, tokens) of a picture."""
    rows = side // tower.config.patch_size
    patches = torch.rand(rows * rows, tower.config.patch_values) * 2 - 1
    since, of_process = time.perf_counter(), time.process_time()
    features = tower.begin_run(patches, [(1, rows, rows)]).advance(tower.config.num_layers)
    took = time.perf_counter() - since, time.process_time() - of_process
    assert features is not None, "all layers have run"
    return *took, len(features[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=[448, 1024], help="multiples of 32 pixels")
    parser.add_argument("--venvs", type=Path, default=HERE / ".venvs", help="folder of environments")
    arguments = parser.parse_args()
    command = [arguments.venvs / "llama.cpp" / "bin" / "python", HERE / "run_mtmd.py"]
    with tempfile.TemporaryDirectory() as name:
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert peer.stdin is not None, "a pipe"
        assert peer.stdout is not None, "a pipe"

        def ask(line: str) -> None:
            print(line, file=peer.stdin, flush=True)

        ask(json.dumps({"vision": VISION, "threads": arguments.threads, "folder": name}))
        if not peer.stdout.readline():
            sys.exit("mtmd did not start")
        torch.set_num_threads(1)
        with torch.inference_mode():
            tower = open_tower(Path(name), arguments.threads)
            for side in arguments.sides:
                own, others = list[tuple[float, float, int]](), list[tuple[float, float, int]]()
                for number in range(arguments.rounds + 1):  # the first allocates
                    own.append(encode(tower, side))
                    ask(str(side))
                    others.append(tuple(json.loads(peer.stdout.readline() or sys.exit("mtmd has ended"))))
                    if not number:
                        assert own.pop()[2] == others.pop()[2], "another number of tokens"
                for what, place in (("seconds", 0), ("processor seconds", 1)):
                    mine, theirs = (statistics.median(each[place] for each in found) for found in (own, others))
                    print(f"{side} x {side}: {what} {mine:.3f}, mtmd {theirs:.3f}, ratio {theirs / mine:.2f}")
        peer.stdin.close()
        peer.wait()


if __name__ == "__main__":
    main()
