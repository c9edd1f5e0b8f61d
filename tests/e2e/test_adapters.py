"""Adapters through the whole engine: what Transformers computes with them merged, and the same bits in any company."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from quire.config.adapter_files import open_adapter, scaled
from quire.config.adapters import AdaptersConfig
from quire.engine.async_engine import AsyncLLM
from quire.errors import InternalError, ModelLoadError, UserError
from quire.kernels.cpu.recorder import RecordedProgram, Recorder
from quire.llm import LLM
from quire.lora_request import LoRARequest
from quire.models.adapters import ModelAdapters
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.worker import Worker
from tests.fakes.adapters import PREFIX, merged, write, write_adapter
from tests.long import all_but_long
from tests.models.families import FAMILIES, qwen3
from tests.models.harness import random_prompts, randomize, save
from tests.models.hybrid_families import HYBRID_FAMILIES

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "num_blocks_override": 40}
PROMPTS = random_prompts([21, 5, 21, 21, 3], 97, seed=5)
PROMPTS[2] = PROMPTS[3] = PROMPTS[0]


class Tiny(NamedTuple):
    model: PreTrainedModel
    directory: Path
    first: LoRARequest
    second: LoRARequest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Qwen3 with two adapters on all projections and the embedding, of which one is on the head too, and has another
    rank for some."""
    directory = tmp_path_factory.mktemp("tiny")
    model = randomize(qwen3(num_hidden_layers=2, hidden_size=64, intermediate_size=96))
    save(model, directory / "base")
    write_adapter(model, directory / "first", rank=16, seed=1, tables=("embedding",))
    write_adapter(
        model,
        directory / "second",
        rank=4,
        seed=2,
        rank_of=lambda name: 7 if name.endswith("gate_proj") else None,
        rank_pattern={"gate_proj": 7},
        alpha_pattern={"o_proj": 5},
        use_rslora=True,
        tables=("head", "embedding"),
    )
    requests = (LoRARequest(name, 1 + i, str(directory / name)) for i, name in enumerate(("first", "second")))
    return Tiny(model, directory / "base", *requests)


def engine(directory: Path, **options: Any) -> LLM:
    given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_model_len": 128, **SMALL, **options}
    return LLM(str(directory), **given)


def bits(output: RequestOutput) -> list[tuple[int, dict[int, float]]]:
    """Tokens, and the log-probabilities beside each."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    entries = [{token: each.logprob for token, each in entry.items()} for entry in completion.logprobs]
    return list(zip(completion.token_ids, entries, strict=True))


def check_logprobs(model: PreTrainedModel, prompt: Sequence[int], output: RequestOutput) -> None:
    """Compare with what Transformers computes for the same tokens."""
    found = bits(output)
    tokens = torch.tensor([[*prompt, *(token for token, _ in found)]])
    with torch.no_grad():
        wanted = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for place, (_, entry) in enumerate(found):
        for token, logprob in entry.items():
            assert logprob == pytest.approx(wanted[place, token].item(), abs=TOLERANCE)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_two_adapters_and_the_base_in_one_step(tiny: Tiny, backend: str) -> None:
    which = [tiny.first, tiny.second, None, tiny.second, tiny.first]
    models = {request: merged(tiny.model, Path(request.path)) for request in (tiny.first, tiny.second)}
    base = tiny.model.double()
    with engine(tiny.directory, attention_backend=backend) as llm:
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
        for prompt, request, output in zip(PROMPTS, which, together, strict=True):
            check_logprobs(base if request is None else models[request], prompt, output)
            alone = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)[0]
            assert bits(alone) == bits(output), "the same bits in any company"
        assert len({output.outputs[0].token_ids[0] for output in together[:4]}) > 1, "adapters change something"
    with engine(tiny.directory, attention_backend=backend, enable_lora=False) as llm:
        assert bits(llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]) == bits(together[2])


@pytest.mark.parametrize(
    "family",
    all_but_long(
        [
            "llama-biases",
            "qwen2",
            "gpt2",
            "opt",
            "phi3",
            "gemma2",
            "gemma3",
            "glm",
            "glm4",
            "granite",
            "olmo2",
            "smollm3",
        ],
        ["gpt2", "glm", "phi3"],
    ),
)
def test_families(family: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES[family]())
    # Of six seeds the one by which rounding in float32 moves SmolLM3's logits least: 3.5e-5, others up to 1.3e-4.
    directory, adapter = save(model, tmp_path / "base"), write_adapter(model, tmp_path / "adapter", seed=6)
    request = LoRARequest("adapter", 1, str(adapter))
    with engine(directory) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[request, None])
    check_logprobs(merged(model, adapter), PROMPTS[0], outputs[0])
    check_logprobs(model.double(), PROMPTS[1], outputs[1])


@pytest.mark.parametrize(
    "family", all_but_long(["qwen3", "qwen3-untied", "gpt2", "opt", "gemma2", "gemma3", "granite"], ["qwen3", "gemma3"])
)
def test_heads_and_embeddings(family: str, tmp_path: Path) -> None:
    """Each alone and both, tied or not, in both back ends: as in Transformers with the sums in own matrices."""
    make = FAMILIES.get(family, partial(qwen3, tie_word_embeddings=family == "qwen3"))
    model = randomize(make())
    directory = save(model, tmp_path / "base")
    targets = [("head",), ("embedding",), ("head", "embedding")]
    adapters = [
        write_adapter(model, tmp_path / str(seed), seed=seed, targets=lambda name: "v_proj" in name, tables=each)
        for seed, each in enumerate(targets, 1)
    ]
    requests = [LoRARequest(str(seed), seed, str(path)) for seed, path in enumerate(adapters, 1)]
    which = [requests[0], None, requests[1], requests[2], requests[2]]
    for backend in ("auto", "torch"):
        with engine(directory, attention_backend=backend, max_loras=3) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
            for place in (0, 2, 3):
                alone = llm.generate(PROMPTS[place], GREEDY, use_tqdm=False, lora_request=which[place])[0]
                assert bits(alone) == bits(outputs[place])
                check_logprobs(merged(model, adapters[place - (place > 0)]), PROMPTS[place], outputs[place])
        with engine(directory, attention_backend=backend, enable_lora=False) as llm:
            assert bits(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0]) == bits(outputs[1])


SPLIT: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[str], bool]]] = {
    "qwen3-next": (HYBRID_FAMILIES["qwen3-next"], lambda name: ".experts." not in name),
    "qwen3.5": (HYBRID_FAMILIES["qwen3.5"], lambda name: True),
    "deepseek-v3": (FAMILIES["deepseek-v3"], lambda name: True),
    "deepseek-v2": (FAMILIES["deepseek-v2"], lambda name: True),
}
"""Models whose matrices are of several layers here, and their adapters' modules."""


@pytest.mark.parametrize("family", all_but_long(list(SPLIT), ["qwen3-next", "deepseek-v3"]))
def test_matrices_of_several_layers(family: str, tmp_path: Path) -> None:
    """As in Transformers, and with the same bits alone and where memory is short."""
    make, targets = SPLIT[family]
    model = randomize(make())
    model.set_experts_implementation("eager")  # takes float64
    directory = save(model, tmp_path / "base")
    adapters = [write_adapter(model, tmp_path / str(seed), seed=seed, targets=targets) for seed in (6, 7)]
    requests = [LoRARequest(str(seed), seed, str(path)) for seed, path in enumerate(adapters, 1)]
    which = [requests[0], None, requests[1], requests[0], None]
    with engine(directory) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
        alone = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=requests[0])[0]
        hit = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=requests[1])[0]
    assert bits(alone) == bits(outputs[0]) == bits(outputs[3])
    assert bits(hit) == bits(outputs[2]) != bits(alone)
    with engine(directory, attention_backend="torch") as llm:
        plain = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=which[:2])
    check_logprobs(merged(model, adapters[0]), PROMPTS[0], plain[0])
    with engine(directory, max_num_batched_tokens=7, max_prefill_chunk=5) as llm:
        chunks = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
    assert [bits(output) for output in chunks] == [bits(output) for output in outputs]
    for place, adapter in ((0, adapters[0]), (2, adapters[1])):
        check_logprobs(merged(model, adapter), PROMPTS[place], outputs[place])
    check_logprobs(model.double(), PROMPTS[1], outputs[1])


@pytest.mark.parametrize("quantization", ["w8a8", "int4", "mxfp4"])
def test_quantised_bases(tiny: Tiny, quantization: str) -> None:
    """The base's products are quantised, and what adapters add is not: rows without one have the base's bits."""
    which = [tiny.first, tiny.second, None, tiny.first]
    with engine(tiny.directory, quantization=quantization) as llm:
        together = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=which)
        alone = [
            llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)[0]
            for prompt, request in zip(PROMPTS, which, strict=False)
        ]
    assert [bits(output) for output in together] == [bits(output) for output in alone]
    with engine(tiny.directory, quantization=quantization, enable_lora=False) as llm:
        assert bits(llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]) == bits(together[2])
    assert bits(together[0]) != bits(together[2])


def test_blocks_are_of_the_adapters_content(tiny: Tiny, tmp_path: Path) -> None:
    """Neither name, number nor place of an adapter counts for the prefix cache."""
    copy = write_adapter(tiny.model, tmp_path / "copy", rank=16, seed=1, tables=("embedding",))
    once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with engine(tiny.directory) as llm:
        cached = [
            llm.generate(PROMPTS[0], once, use_tqdm=False, lora_request=request)[0].num_cached_tokens
            for request in (tiny.first, None, tiny.second, LoRARequest("other", 9, str(copy)), None)
        ]
    assert cached == [0, 0, 0, 16, 16]


def test_scales_are_content(tiny: Tiny) -> None:
    """One adapter with three scales and the base in one step, also where memory is short, as each computes alone."""
    ref = open_adapter(tiny.first.path, AdaptersConfig(max_rank=16))
    which = [scaled(ref, 0.5), ref, None, scaled(ref, -2.0), scaled(ref, 0.5)]
    longer = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    with engine(tiny.directory, max_loras=3, num_blocks_override=9, max_num_batched_tokens=16) as llm:
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, lora_request=[which[0], ref, which[3]])  # loads them
        together = llm.generate(PROMPTS, longer, use_tqdm=False, lora_request=which)
        assert llm.stats()["preemptions_total"] > 0
        for prompt, request, output in zip(PROMPTS, which, together, strict=True):
            assert bits(llm.generate(prompt, longer, use_tqdm=False, lora_request=request)[0]) == bits(output)
    for place, factor in ((0, 0.5), (3, -2.0)):
        check_logprobs(merged(tiny.model, Path(tiny.first.path), factor), PROMPTS[place], together[place])


def test_registered_prefixes_are_the_bases(tiny: Tiny) -> None:
    """Also one that ends inside the first block, which no full block's hash tells apart."""
    for length in (5, 18):
        with engine(tiny.directory) as llm:
            llm.register_prefix(PROMPTS[0][:length])
            base, adapted = llm.generate([PROMPTS[0]] * 2, GREEDY, use_tqdm=False, lora_request=[None, tiny.first])
            alone = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]
        assert base.num_cached_tokens >= length
        assert adapted.num_cached_tokens == 0
        assert bits(alone) == bits(adapted)
    check_logprobs(merged(tiny.model, Path(tiny.first.path)), PROMPTS[0], adapted)


def test_more_adapters_than_run_at_a_time(tiny: Tiny, tmp_path: Path) -> None:
    """They take turns in one slot, and requests without an adapter do not wait."""
    paths = [write_adapter(tiny.model, tmp_path / str(seed), seed=seed) for seed in range(3)]
    requests = [LoRARequest(path.name, 1 + i, str(path)) for i, path in enumerate(paths)]
    which = [requests[0], requests[1], None, requests[2], requests[0]]
    with engine(tiny.directory, max_loras=1) as llm:
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, max_loras=3) as llm:
        wide = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
    assert [bits(output) for output in together] == [bits(output) for output in wide]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks_override": 9, "max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 7, "max_prefill_chunk": 5},
        {"num_blocks_override": 9, "preemption_mode": "swap", "swap_space": "1MiB"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["preempted", "chunks", "swapped", "drafts"],
)
def test_schedules(tiny: Tiny, options: dict[str, Any]) -> None:
    which = [tiny.first, tiny.second, None, tiny.second, tiny.first]
    longer = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    with engine(tiny.directory) as llm:
        wanted = llm.generate(PROMPTS, longer, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, **options) as llm:
        # Loaded first: else it depends on the time that loads take which requests meet.
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, lora_request=[tiny.first, tiny.second])
        found = llm.generate(PROMPTS, longer, use_tqdm=False, lora_request=which)
        stats = llm.stats()
    assert [bits(output) for output in found] == [bits(output) for output in wanted]
    if "num_blocks_override" in options:
        assert stats["preemptions_total"] > 0


def test_steps_without_adapters_run_the_programs_without(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel for kernel those of an engine without `enable_lora`, in body and head."""
    finish_program, recorded = Recorder.finish_program, []

    def noted(recorder: Recorder, *args: Any, **options: Any) -> RecordedProgram:
        recorded.append([call.kernel for call in recorder.calls])
        return finish_program(recorder, *args, **options)

    monkeypatch.setattr(Recorder, "finish_program", noted)
    kernels = []
    for enable_lora in (True, False):
        recorded.clear()
        with engine(tiny.directory, enable_lora=enable_lora, attention_backend="native") as llm:
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        kernels.append(list(recorded))
    assert kernels[0] == kernels[1] != []


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_of_adapters_behind_one_of_as_many_rows_without(tiny: Tiny, count: int) -> None:
    """Prompts of which all but a token is cached begin with a step like a decode's."""
    prompts = random_prompts([33] * count, 97, seed=7)
    with engine(tiny.directory) as llm:
        alone = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=tiny.first)
        llm.generate([prompt[:20] for prompt in prompts], GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=tiny.first)
        base = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [32] * count
    assert [bits(output) for output in again] == [bits(output) for output in alone]
    assert [bits(output) for output in base] != [bits(output) for output in alone]


@pytest.mark.long
def test_prompts_dealt_to_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """The bits of one rank, in a process of its own: torch adds to embeddings, there without the tests' products."""
    own = LoRARequest("own", 3, str(write_adapter(tiny.model, tmp_path / "own", rank=16, seed=5, tables=("head",))))
    longer = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    which = [own, None, own, tiny.second, tiny.first]
    with engine(tiny.directory, max_loras=3, distributed_executor_backend="mp") as llm:
        wanted = llm.generate(PROMPTS, longer, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, max_loras=3, prefill_context_parallel_size=2) as llm:
        llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, lora_request=[own, tiny.first, tiny.second])
        found = llm.generate(PROMPTS, longer, use_tqdm=False, lora_request=which)
    assert [bits(output) for output in found] == [bits(output) for output in wanted]


@pytest.mark.long
def test_two_ranks(tiny: Tiny) -> None:
    """Ranks have shares of the head's matrices, and the embedding's whole."""
    with engine(tiny.directory, tensor_parallel_size=2) as llm:
        which = [tiny.first, tiny.second, None]
        outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, lora_request=which)
        alone = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False, lora_request=tiny.second)[0]
    assert bits(alone) == bits(outputs[1])
    for prompt, request, output in zip(PROMPTS, which, outputs, strict=False):
        model = tiny.model.double() if request is None else merged(tiny.model, Path(request.path))
        check_logprobs(model, prompt, output)


def test_two_stages(tiny: Tiny, tmp_path: Path) -> None:
    """The bits of one rank, in a process of its own: torch adds to embeddings, there without the tests' products. A
    stage checks the matrices of other stages too, so that all refuse an adapter."""
    which = [tiny.first, tiny.second, None, tiny.second, tiny.first]
    usual = Path(tiny.first.path)
    config = json.loads((usual / "adapter_config.json").read_text())
    with engine(tiny.directory, distributed_executor_backend="mp") as llm:
        wanted = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, pipeline_parallel_size=2) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
        assert [bits(output) for output in found] == [bits(output) for output in wanted]
        for prompt, request, output in zip(PROMPTS, which, found, strict=True):
            model = tiny.model.double() if request is None else merged(tiny.model, Path(request.path))
            check_logprobs(model, prompt, output)
            alone = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)[0]
            assert bits(alone) == bits(output)
        for layer in (0, 1, 2):
            tensors = load_file(usual / "adapter_model.safetensors")
            tensors[f"{PREFIX}model.layers.{layer}.mlp.up_proj.lora_A.weight"] = torch.ones(16, 65)
            damaged = write(tmp_path / str(layer), tensors, config)
            message = "is missing" if layer == 2 else rf"layers\.{layer}\.mlp\.up_proj.* has shape"
            request = LoRARequest(f"damaged {layer}", 5 + layer, str(damaged))
            with pytest.raises(UserError, match=message):
                llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)
        llm.sleep(level=2)
        llm.wake_up()
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
        assert [bits(output) for output in again] == [bits(output) for output in found]


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
def test_families_in_two_stages(family: str, tmp_path: Path) -> None:
    model = randomize({**FAMILIES, **HYBRID_FAMILIES}[family]())
    directory, adapter = save(model, tmp_path / "base"), write_adapter(model, tmp_path / "adapter", seed=6)
    which = [LoRARequest("adapter", 1, str(adapter)), None]
    found = []
    for count in (1, 2):
        with engine(directory, pipeline_parallel_size=count) as llm:
            found.append(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=which))
    assert [bits(output) for output in found[0]] == [bits(output) for output in found[1]]


def test_scores_of_prompts(tiny: Tiny) -> None:
    """Log-probabilities of a prompt's tokens are its adapter's too."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with engine(tiny.directory) as llm:
        outputs = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False, lora_request=[tiny.second, None])
    for model, output in zip((merged(tiny.model, Path(tiny.second.path)), tiny.model.double()), outputs, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
        entries = output.prompt_logprobs
        assert entries is not None
        for place, token in enumerate(PROMPTS[0][1:]):
            entry = entries[place + 1]
            assert entry is not None
            assert entry[token].logprob == pytest.approx(wanted[place, token].item(), abs=TOLERANCE)


def test_several_sequences_and_beams(tiny: Tiny) -> None:
    """Forks keep their parent's adapter."""
    several = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True)
    beams = SamplingParams(use_beam_search=True, n=2, temperature=0.0, max_tokens=5, ignore_eos=True)
    with engine(tiny.directory) as llm:
        for params in (several, beams):
            pair = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False, lora_request=[tiny.first, None])
            alone = llm.generate(PROMPTS[0], params, use_tqdm=False, lora_request=tiny.first)[0]
            tokens = [[each.token_ids for each in output.outputs] for output in (*pair, alone)]
            assert tokens[0] == tokens[2] != tokens[1]


def test_sleep(tiny: Tiny) -> None:
    """What was loaded is there again behind a sleep that drops the weights."""
    with engine(tiny.directory) as llm:
        before = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]
        llm.sleep(level=2)
        llm.wake_up()
        assert bits(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]) == bits(before)


def test_an_adapter_that_is_gone_does_not_keep_an_engine_asleep(tiny: Tiny, tmp_path: Path) -> None:
    """After the weights were dropped each adapter is read again for its next request."""
    gone = tmp_path / "gone"
    shutil.copytree(tiny.first.path, gone)
    with engine(tiny.directory) as llm:
        wanted = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.second)[0]
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=LoRARequest("gone", 7, str(gone)))
        shutil.rmtree(gone)
        llm.sleep(level=2)
        llm.wake_up()
        found = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.second)[0]
    assert bits(found) == bits(wanted)


async def test_a_sleep_while_an_adapter_loads(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request has been aborted. Later ones load it again."""
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "max_model_len": 128, **SMALL}
    llm = AsyncLLM(model=str(tiny.directory), in_process=True, **options)
    begun, may_end, load, drop = threading.Event(), threading.Event(), ModelAdapters.load, Worker.sleep
    order: list[str] = []

    def slowly(*arguments: Any) -> None:
        begun.set()
        may_end.wait()
        load(*arguments)
        order.append("loaded")

    def sleep(*arguments: Any) -> None:
        drop(*arguments)
        order.append("asleep")

    async def tokens() -> list[int]:
        prompt: Any = {"prompt_token_ids": PROMPTS[0]}
        outputs = [output async for output in llm.generate(prompt, GREEDY, lora_request=tiny.first)]
        return outputs[-1].outputs[0].token_ids

    with monkeypatch.context() as patched:
        patched.setattr(ModelAdapters, "load", slowly)
        patched.setattr(Worker, "sleep", sleep)
        first = asyncio.ensure_future(tokens())
        assert await asyncio.to_thread(begun.wait, 120)
        first.cancel()
        await asyncio.wait([first])
        threading.Timer(0.3, may_end.set).start()
        await llm.sleep(2)
        assert order == ["loaded", "asleep"]
    await llm.wake_up()
    found = await asyncio.wait_for(tokens(), 120)
    llm.shutdown()
    with engine(tiny.directory) as alone:
        wanted = alone.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]
    assert found == wanted.outputs[0].token_ids


def test_a_wake_up_that_failed_is_made_anew(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the failed one is kept."""
    with engine(tiny.directory) as llm:
        wanted = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]
        llm.sleep(level=2)
        tower = Mock(side_effect=[ModelLoadError("no tower"), None])
        monkeypatch.setattr(CpuPlatform, "load_images", tower)
        with pytest.raises(InternalError, match="no tower"):
            llm.wake_up()
        llm.wake_up()
        assert tower.call_count == 2
        found = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)[0]
    assert bits(found) == bits(wanted)


def test_a_changed_directory(tiny: Tiny, tmp_path: Path) -> None:
    """A number stands for what it was first named with: other content is an error, or asked for."""
    place = write_adapter(tiny.model, tmp_path / "place", seed=8)
    request = LoRARequest("place", 5, str(place))
    with engine(tiny.directory, max_loras=1) as llm:
        before = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)[0]
        write_adapter(tiny.model, place, seed=9)
        assert bits(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)[0]) == bits(before)
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)  # takes the slot
        with pytest.raises(UserError, match="has changed since it was named"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)
        anew = LoRARequest("place", 5, str(place), load_inplace=True)
        after = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=anew)[0]
    check_logprobs(merged(tiny.model, place), PROMPTS[0], after)


def test_refusals(tiny: Tiny, tmp_path: Path) -> None:
    wide = write_adapter(tiny.model, tmp_path / "wide", rank=17)
    with engine(tiny.directory) as llm:
        for request, message in (
            (LoRARequest("a", 3, str(tmp_path / "none")), "is no directory of an adapter"),
            (LoRARequest("a", 4, str(wide)), "rank 17 needs max_lora_rank"),
            (LoRARequest("a", 1, str(wide)), "stands for"),
            ("first", "must be a LoRARequest, not str"),
        ):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)
            with pytest.raises(UserError, match=message):
                llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="got 1 lora_requests for 2 prompts"):
            llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[tiny.first])
    with (
        engine(tiny.directory, enable_lora=False) as llm,
        pytest.raises(UserError, match="needs an engine with enable_lora"),
    ):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.first)


def test_vectors_of_adapters(tiny: Tiny, tmp_path: Path) -> None:
    """A vector is that of Transformers with the adapter merged; one without an adapter has the base's bits."""
    prompts: Any = [{"prompt_token_ids": each} for each in PROMPTS[:3]]
    third = LoRARequest("third", 3, str(write_adapter(tiny.model, tmp_path / "third", seed=3)))
    with engine(tiny.directory, runner="pooling") as llm:
        found = llm.embed(prompts, lora_request=[tiny.first, None, third], use_tqdm=False)
        with pytest.raises(UserError, match="got 1 lora_requests for 3 prompts"):
            llm.embed(prompts, lora_request=[tiny.first], use_tqdm=False)
    with LLM(str(tiny.directory), runner="pooling", max_model_len=128, **SMALL) as llm:
        (base,) = llm.embed(prompts[1:2], use_tqdm=False)
    assert found[1].outputs.embedding == base.outputs.embedding
    for place, request in ((0, tiny.first), (2, third)):
        model = merged(tiny.model, Path(request.path))
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([PROMPTS[place]])).last_hidden_state[0, -1]
        wanted = torch.nn.functional.normalize(hidden.float(), dim=0)
        assert torch.allclose(torch.tensor(found[place].outputs.embedding), wanted, atol=TOLERANCE)
