"""Engines that a launcher starts, one for each rank: they plan the same steps, or say that they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.clock import VirtualClock
from quire.config.options import EngineOptions
from quire.config.parallel import ParallelConfig, choose_executor
from quire.config.resolve import resolve
from quire.engine.process_client import ProcessClient
from quire.errors import ConfigError, QuireError
from quire.executors.launched import AgreedClock, LaunchedRank
from tests.executors.launched_program import PREEMPTED, make_requests
from tests.fakes.ranks import ThreadRank, run_ranks
from tests.models.families import qwen3
from tests.models.harness import randomize, save

PROGRAM = Path(__file__).with_name("launched_program.py")
SIZE = "tensor_parallel_size"
LAUNCHED: dict[str, Any] = {SIZE: 2, "distributed_executor_backend": "external_launcher"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen3()), tmp_path_factory.mktemp("qwen3"))


def launch(model_path: Path, directory: Path, size: str, *arguments: int) -> list[dict[str, Any]]:
    """What the ranks have written, in their order. size: option that is 2."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    command += [str(model_path), str(directory), size, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("size", [SIZE, "prefill_context_parallel_size", "pipeline_parallel_size"])
def test_two_engines_plan_the_same_steps(model_path: Path, tmp_path: Path, size: str) -> None:
    """With preemption and priorities that grow with time, while one rank is slow. Greedy tokens are those of one
    rank."""
    first, second = launch(model_path, tmp_path, size, 200, 1, -1)
    assert first["plans"] == second["plans"]
    assert first["tokens"] == second["tokens"]
    assert first["preemptions"] > 0
    llm = LLM(str(model_path), skip_tokenizer_init=True, num_threads=1, **PREEMPTED)
    prompts, params = make_requests(200)
    greedy = [number for number, each in enumerate(params) if each.temperature == 0]
    some = ([each[number] for number in greedy] for each in (prompts, params))
    alone = [[list(each.token_ids) for each in output.outputs] for output in llm.generate(*some, use_tqdm=False)]
    assert [first["tokens"][number] for number in greedy] == alone


@pytest.mark.long
def test_an_engine_that_is_given_other_requests_says_so(model_path: Path, tmp_path: Path) -> None:
    _, second = launch(model_path, tmp_path, SIZE, 6, -1, 1)
    assert "rank 1 plans other steps than rank 0" in second["error"]


def test_the_first_ranks_time_holds_for_all() -> None:
    def look(group: ThreadRank) -> list[float]:
        own = VirtualClock()
        own.advance(100.0 * (1 + group.rank))
        clock = AgreedClock(group, own)
        seen = [clock.now()]
        own.advance(1.0)
        clock.note(b"plan 1")
        return [*seen, clock.now()]

    assert run_ranks(2, look) == [[100.0, 101.0]] * 2


def test_another_plan_is_noticed_by_the_next_look() -> None:
    def look(group: ThreadRank) -> str:
        clock = AgreedClock(group, VirtualClock())
        clock.note(b"plan 1")
        clock.now()
        clock.note(b"plan 2" if group.rank < 2 else b"plan 3")
        try:
            clock.now()
        except QuireError as error:
            return str(error)
        return ""

    assert [said.partition(":")[0] for said in run_ranks(3, look)] == ["", "", "rank 2 plans other steps than rank 0"]


def test_without_a_launcher(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        LaunchedRank(resolve(EngineOptions(model=str(model_path), **LAUNCHED)))
    for options in ({"kv_offload_dir": "/nowhere"}, {"enable_lora": True}):
        with pytest.raises(ConfigError, match="'external_launcher' is not possible"):
            resolve(EngineOptions(model=str(model_path), **{**LAUNCHED, **options}))
    counting = EngineOptions(pipeline_parallel_size=2, expert_counts=True, **LAUNCHED)
    with pytest.raises(ConfigError, match="its own stage's experts"):
        choose_executor(counting, ParallelConfig(2, 2), is_accelerated=False)


@pytest.mark.long
def test_a_process_of_its_own_is_no_launched_engine(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for LLM"):
        _ = ProcessClient(EngineOptions(model=str(model_path), skip_tokenizer_init=True, **LAUNCHED)).ready
