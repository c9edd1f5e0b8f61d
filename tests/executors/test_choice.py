"""One rank pays nothing for the others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
import torch
before = set(sys.modules)
from quire.llm import LLM
from quire.sampling_params import SamplingParams
with LLM(num_threads=1, num_blocks_override=20) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.long
def test_one_rank_imports_nothing_of_several() -> None:
    """torch brings some of torch.distributed by itself."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    assert "quire.executors.local" in found
    ours = (
        "quire.executors.multiprocess",
        "quire.executors.rank",
        "quire.parallel.torch_dist",
        "quire.engine.replicas",
    )
    assert [name for name in found if name in ours or name.startswith(("torch.distributed", "multiprocessing"))] == []
