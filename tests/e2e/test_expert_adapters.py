"""Adapters of experts through the whole engine: as Transformers and PEFT compute, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from tests.e2e.test_adapters import GREEDY, PROMPTS, bits, check_logprobs, engine
from tests.fakes.adapters import merged, stacked_names, write_adapter
from tests.long import all_but_long
from tests.models.families import FAMILIES, mixtral, qwen3_moe
from tests.models.harness import randomize, save
from tests.models.hybrid_families import HYBRID_FAMILIES

LONGER = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)


def mixtral_names(module: str, expert: int) -> dict[str, str]:
    own = f"{module.replace('.mlp.', '.block_sparse_moe.')}.{expert}"
    return {"gate": f"{own}.w1", "up": f"{own}.w3", "down": f"{own}.w2"}


def usual_names(module: str, expert: int) -> dict[str, str]:
    return {part: f"{module}.{expert}.{part}_proj" for part in ("gate", "up", "down")}


def down_alone(module: str, expert: int) -> dict[str, str]:
    """Modules of two of the experts."""
    return {"down": f"{module}.{expert}.down_proj"} if expert % 3 == 0 else {}


class Tiny(NamedTuple):
    model: PreTrainedModel
    directory: Path
    requests: list[LoRARequest]


def make(directory: Path, build: Callable[[], PreTrainedModel], experts: list[Any], rank: int = 8) -> Tiny:
    """A model, and adapters of its experts, attention and dense layers."""
    model = randomize(build())
    model.set_experts_implementation("eager")  # takes float64
    save(model, directory / "base")
    paths = [
        write_adapter(model, directory / str(seed), seed=seed, rank=rank - seed, experts=each)
        for seed, each in enumerate(experts, 1)
    ]
    requests = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]
    return Tiny(model, directory / "base", requests)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Qwen3-MoE with adapters of all experts, in both forms, and of some."""
    build = partial(qwen3_moe, norm_topk_prob=True)
    return make(tmp_path_factory.mktemp("tiny"), build, [stacked_names, usual_names, down_alone])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_experts_of_three_adapters_and_the_base_in_one_step(tiny: Tiny, backend: str) -> None:
    first, second, third = tiny.requests
    which = [first, second, None, third, first]
    with engine(tiny.directory, attention_backend=backend, max_loras=3) as llm:
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=which)
        for prompt, request, output in zip(PROMPTS, which, together, strict=True):
            model = tiny.model.double() if request is None else merged(tiny.model, Path(request.path))
            check_logprobs(model, prompt, output)
            alone = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)[0]
            assert bits(alone) == bits(output), "the same bits in any company"
    assert len({tuple(output.outputs[0].token_ids) for output in together[:4]}) > 1
    with engine(tiny.directory, attention_backend=backend, enable_lora=False) as llm:
        assert bits(llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]) == bits(together[2])


STACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": partial(mixtral, 5, 2),
    "llama4": FAMILIES["llama4"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "qwen2-moe": FAMILIES["qwen2-moe"],
    "qwen3.5-moe": HYBRID_FAMILIES["qwen3.5-moe"],
    "qwen3-next": HYBRID_FAMILIES["qwen3-next"],
    "deepseek-v3": FAMILIES["deepseek-v3"],
}
"""Families with other shapes, names or rules of experts."""


@pytest.mark.parametrize("family", all_but_long(list(STACKED), ["mixtral", "llama4", "gpt-oss"]))
def test_families(family: str, tmp_path: Path) -> None:
    tiny = make(tmp_path, STACKED[family], [stacked_names])
    which = [tiny.requests[0], None]
    with engine(tiny.directory) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=which)
    check_logprobs(merged(tiny.model, Path(tiny.requests[0].path)), PROMPTS[0], outputs[0])
    check_logprobs(tiny.model.double(), PROMPTS[1], outputs[1])


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    """Mixtral's experts one by one."""
    tiny = make(tmp_path, partial(mixtral, 5, 2), [mixtral_names])
    with engine(tiny.directory) as llm:
        output = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.requests[0])[0]
    check_logprobs(merged(tiny.model, Path(tiny.requests[0].path)), PROMPTS[0], output)


@pytest.mark.parametrize("quantization", ["w8a8", "int4", "mxfp4"])
def test_quantised_experts(tmp_path: Path, quantization: str) -> None:
    """What adapters add is not quantised, and rows without one have the base's bits."""
    build = partial(qwen3_moe, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1)
    tiny = make(tmp_path, build, [stacked_names, usual_names])
    which = [tiny.requests[0], tiny.requests[1], None, tiny.requests[0]]
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_of_16_bits(tiny: Tiny, dtype: str) -> None:
    """Near what the same matrices in float32 compute."""
    with engine(tiny.directory, lora_dtype=dtype) as llm:
        output = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=tiny.requests[0])[0]
    model = merged(tiny.model, Path(tiny.requests[0].path), dtype=getattr(torch, dtype))
    check_logprobs(model, PROMPTS[0], output)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks_override": 9, "max_num_batched_tokens": 16, "num_threads": 2},
        {"max_num_batched_tokens": 7, "max_prefill_chunk": 5},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["preempted", "chunks", "drafts"],
)
def test_schedules(tiny: Tiny, options: dict[str, Any]) -> None:
    first, second, _ = tiny.requests
    which = [first, second, None, second, first]
    with engine(tiny.directory) as llm:
        wanted = llm.generate(PROMPTS, LONGER, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, **options) as llm:
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, lora_request=[first, second])  # loads them
        found = llm.generate(PROMPTS, LONGER, use_tqdm=False, lora_request=which)
    assert [bits(output) for output in found] == [bits(output) for output in wanted]


def test_sleep_and_forks(tiny: Tiny) -> None:
    several = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True)
    with engine(tiny.directory) as llm:
        before = llm.generate([PROMPTS[0]] * 2, several, use_tqdm=False, lora_request=[tiny.requests[0], None])
        llm.sleep(level=2)
        llm.wake_up()
        after = llm.generate(PROMPTS[0], several, use_tqdm=False, lora_request=tiny.requests[0])[0]
    tokens = [[each.token_ids for each in output.outputs] for output in (*before, after)]
    assert tokens[0] == tokens[2] != tokens[1]


WHOLE_EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
RANKS: dict[str, dict[str, Any]] = {
    "slices": {"tensor_parallel_size": 2},
    "whole experts": WHOLE_EXPERTS,
    "in turns, in torch": {
        **WHOLE_EXPERTS,
        "expert_placement_strategy": "round_robin",
        "attention_backend": "torch",
    },
    "stages": {**WHOLE_EXPERTS, "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("ranks", all_but_long(list(RANKS), ["whole experts"]))
def test_ranks(tiny: Tiny, ranks: str) -> None:
    """Ranks share each expert's inner width, or have whole experts."""
    which = [*tiny.requests, None]
    with engine(tiny.directory, max_loras=3, **RANKS[ranks]) as llm:
        outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=which)
        alone = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False, lora_request=which[1])[0]
    assert bits(alone) == bits(outputs[1])
    for request, prompt, output in zip(tiny.requests, PROMPTS, outputs, strict=False):
        check_logprobs(merged(tiny.model, Path(request.path)), prompt, output)


@pytest.mark.parametrize("backend", all_but_long(["native", "torch"], ["native"]))
def test_adapters_move_with_their_experts(tiny: Tiny, backend: str) -> None:
    """Bits of ranks whose experts stay; loads come between moves, and copies of experts with an adapter replace others
    without one."""
    which = [*tiny.requests, None, tiny.requests[0]]
    options = {**WHOLE_EXPERTS, "enable_eplb": True, "attention_backend": backend, "max_loras": 3}
    stay = {"num_redundant_experts": 0, "step_interval": 10**6}
    with engine(tiny.directory, eplb_config=stay, **options) as llm:
        wanted = [bits(each) for each in llm.generate(PROMPTS, LONGER, use_tqdm=False, lora_request=which)]
    moving = {"num_redundant_experts": 2, "window_size": 3, "step_interval": 4}
    with engine(tiny.directory, eplb_config=moving, **options) as llm:
        workers = llm._client._core._executor
        places = [workers.expert_ranks()]
        for number in (3, 2, 1, 0, 0):
            found = llm.generate(PROMPTS[number:], LONGER, use_tqdm=False, lora_request=which[number:])
            assert [bits(each) for each in found] == wanted[number:]
            places.append(workers.expert_ranks())
    assert len({str(each) for each in places}) > 2, "experts moved before and behind loads"


def test_two_stages(tiny: Tiny) -> None:
    which = [*tiny.requests[:2], None]
    with engine(tiny.directory) as llm:
        wanted = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, lora_request=which)
    with engine(tiny.directory, pipeline_parallel_size=2) as llm:
        found = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, lora_request=which)
    assert [bits(output) for output in found] == [bits(output) for output in wanted]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_as_peft_saves_and_computes(family: str, tmp_path: Path) -> None:
    """One parameter of the two, both, and the router, in a file of PEFT's own."""
    peft = pytest.importorskip("peft")
    model = randomize(FAMILIES[family]())
    model.set_experts_implementation("eager")
    save(model, tmp_path / "base")
    router = "router.weight" if family == "gpt-oss" else "gate.weight"
    targets = [["experts.gate_up_proj"], ["experts.down_proj"], ["experts.down_proj", "experts.gate_up_proj", router]]
    with engine(tmp_path / "base", max_loras=3) as llm:
        for number, parameters in enumerate(targets, 1):
            config = peft.LoraConfig(
                r=4,
                lora_alpha=9,
                target_modules=["q_proj", "v_proj"],
                target_parameters=parameters,
                rank_pattern={"experts.down_proj": 3},
            )
            torch.manual_seed(number)
            adapted = peft.get_peft_model(model, config)
            for name, tensor in adapted.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(tensor, std=0.3)
            adapted.save_pretrained(tmp_path / str(number))
            request = LoRARequest(str(number), number, str(tmp_path / str(number)))
            output = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=request)[0]
            check_logprobs(adapted.double(), PROMPTS[0], output)
            model = adapted.unload().float()
