"""Adapters on a card: the tokens of the plain engine on the CPU, however steps run; the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire import LLM, LoRARequest
from quire.errors import UserError
from quire.outputs import RequestOutput
from tests.e2e.test_expert_adapters import down_alone
from tests.fakes.adapters import stacked_names, write_adapter
from tests.gpu.conftest import greedy, open_engine, tokens, with_graphs
from tests.gpu.test_synchronising import no_synchronising
from tests.models.families import FAMILIES, deepseek_v3, qwen3, qwen3_moe
from tests.models.harness import random_prompts, randomize, save

pytestmark = pytest.mark.gpu

ON_CARD = torch.cuda.is_available()
LONG = 24 if ON_CARD else 3
LENGTHS = [21, 5, 40, 3, 21, 5] if ON_CARD else [9, 3, 9, 3]
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_model_len": 128}
Which = Sequence[LoRARequest | None]
EXPERTS = {"qwen3-moe": partial(qwen3_moe, num_hidden_layers=1, norm_topk_prob=True), "llama4": FAMILIES["llama4"]}
"""Small mixtures; weights of experts multiply results, or inputs."""


class Tiny(NamedTuple):
    directory: Path
    which: Which
    prompts: Sequence[list[int]]

    def complete(self, llm: LLM, rows: Sequence[int], num_tokens: int = LONG) -> list[RequestOutput]:
        """Complete the prompts of these numbers with their adapters."""
        prompts: Any = [{"prompt_token_ids": self.prompts[row]} for row in rows]
        which = [self.which[row] for row in rows]
        return llm.generate(prompts, greedy(num_tokens, logprobs=2), use_tqdm=False, lora_request=which)

    @property
    def rows(self) -> range:
        return range(len(self.prompts))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Qwen3 with two adapters on all projections and the embedding, of which one is on the head too; prompts of both,
    and of the base."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    directory = tmp_path_factory.mktemp("adapters")
    model = randomize(qwen3(num_hidden_layers=3 if ON_CARD else 1, **sizes))
    save(model, directory / "base")
    first = write_adapter(model, directory / "first", rank=16, seed=1, tables=("embedding",))
    second = write_adapter(model, directory / "second", rank=3, seed=2, use_rslora=True, tables=("head", "embedding"))
    adapters = [LoRARequest("first", 1, str(first)), LoRARequest("second", 2, str(second)), None]
    which = [adapters[index % 3] for index in range(len(LENGTHS))]
    return Tiny(directory / "base", which, random_prompts(LENGTHS, 97))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[RequestOutput]:
    """The results of plain torch operators on the CPU."""
    options = {"dtype": "float32", "num_blocks_override": 400, "skip_tokenizer_init": True, "num_threads": 2}
    with LLM(str(tiny.directory), device="cpu", attention_backend="torch", **options, **LORA) as plain:
        return tiny.complete(plain, tiny.rows)


def bits(outputs: Sequence[RequestOutput]) -> list[list[dict[int, float]]]:
    found = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append([{token: each.logprob for token, each in entry.items()} for entry in logprobs])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        with_graphs("full"),
        with_graphs("piecewise"),
        with_graphs("full_and_piecewise"),
        pytest.param({"max_num_batched_tokens": 16}, marks=pytest.mark.gpu(interpretable=False)),
        pytest.param({"num_blocks_override": 8}, marks=pytest.mark.gpu(interpretable=False)),
        pytest.param({"max_loras": 1}, marks=pytest.mark.gpu(interpretable=False)),
    ],
    ids=str,
)
def test_tokens_of_the_cpu(options: dict[str, Any], tiny: Tiny, expected: list[RequestOutput]) -> None:
    """Two adapters and the base in one batch."""
    with open_engine(tiny.directory, **{**LORA, **options}) as llm:
        found = tiny.complete(llm, tiny.rows)
    assert tokens(found) == tokens(expected)
    for own, wanted in zip(bits(found), bits(expected), strict=True):
        for entry, known in zip(own, wanted, strict=True):
            assert entry == pytest.approx(known, abs=1e-3)


@pytest.mark.parametrize("graphs", [None, with_graphs("full_and_piecewise")])
def test_the_same_bits_in_any_company(graphs: dict[str, Any] | None, tiny: Tiny) -> None:
    """And requests without an adapter have those of an engine without adapters."""
    options: dict[str, Any] = {"batch_invariant": True, **(graphs or {})}
    rows = tiny.rows if ON_CARD else range(3)
    with open_engine(tiny.directory, **options, **LORA) as llm:
        together = bits(tiny.complete(llm, rows, 2 if not ON_CARD else LONG))
        alone = [bits(tiny.complete(llm, [row], 2 if not ON_CARD else LONG))[0] for row in rows]
    assert alone == together
    base = [row for row in rows if tiny.which[row] is None]
    with open_engine(tiny.directory, **options) as llm:
        prompts: Any = [{"prompt_token_ids": tiny.prompts[row]} for row in base]
        plain = llm.generate(prompts, greedy(2 if not ON_CARD else LONG, logprobs=2), use_tqdm=False)
    assert bits(plain) == [together[row] for row in base]


@pytest.mark.gpu(interpretable=False)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, tiny: Tiny, expected: list[RequestOutput]) -> None:
    """The first tokens' log-probabilities, within what rounding explains."""
    with open_engine(tiny.directory, dtype=dtype, **LORA) as llm:
        found = bits(tiny.complete(llm, tiny.rows, 1))
    errors = [
        abs(logprob - wanted[0][token])
        for own, wanted in zip(found, bits(expected), strict=True)
        for token, logprob in own[0].items()
        if token in wanted[0]
    ]
    assert errors
    assert max(errors) < 0.1


@pytest.mark.gpu(interpretable=False)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"cuda_graphs": "piecewise"}], ids=str)
def test_steps_do_not_wait(options: dict[str, Any], tiny: Tiny) -> None:
    with open_engine(tiny.directory, max_num_batched_tokens=32, **options, **LORA) as llm:
        tiny.complete(llm, tiny.rows)  # compiles, captures and loads, which may wait
        with no_synchronising():
            found = tiny.complete(llm, tiny.rows)
    assert len(found) == len(tiny.prompts)


@pytest.mark.gpu(interpretable=False)
def test_a_slot_changes_between_steps(tiny: Tiny, tmp_path: Path, expected: list[RequestOutput]) -> None:
    """Graphs find the matrices of the adapter that is in the slot now; so does an engine behind a sleep."""
    with open_engine(tiny.directory, **{**LORA, "max_loras": 1}) as llm:
        for _ in range(2):
            for row in tiny.rows:
                assert tokens(tiny.complete(llm, [row])) == tokens([expected[row]])
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens(tiny.complete(llm, tiny.rows)) == tokens(expected)


@pytest.mark.parametrize("graphs", [None, with_graphs("full_and_piecewise")])
@pytest.mark.parametrize("family", ["qwen3-moe", "llama4"])
def test_experts(family: str, graphs: dict[str, Any] | None, tmp_path: Path) -> None:
    """Two adapters of experts and the base in one batch."""
    model = randomize(EXPERTS[family]())
    save(model, tmp_path / "base")
    paths = [
        write_adapter(model, tmp_path / name, seed=seed, rank=4, experts=experts)
        for seed, (name, experts) in enumerate(
            (("all", stacked_names), ("some", stacked_names if family == "llama4" else down_alone)), 1
        )
    ]
    which = [*(LoRARequest(path.name, 1 + index, str(path)) for index, path in enumerate(paths)), None]
    prompts: Any = [{"prompt_token_ids": each} for each in random_prompts([9, 3, 5], 97)]
    params = greedy(2, logprobs=2)
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1, **LORA}
    with LLM(str(tmp_path / "base"), **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False, lora_request=which)
    with open_engine(tmp_path / "base", batch_invariant=True, **LORA, **(graphs or {})) as llm:
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=which)
        alone = llm.generate(prompts[0], params, use_tqdm=False, lora_request=which[0])
    assert tokens(found) == tokens(expected)
    assert bits(alone) == bits(found[:1])
    for own, wanted in zip(bits(found), bits(expected), strict=True):
        for entry, known in zip(own, wanted, strict=True):
            assert entry == pytest.approx(known, abs=1e-3)


def test_matrices_of_several_layers(tmp_path: Path) -> None:
    """Compressed queries, keys and values of latent attention; the matrix that expands them is refused by name."""
    model = randomize(deepseek_v3(num_hidden_layers=1))
    save(model, tmp_path / "base")
    adapters = [
        write_adapter(model, tmp_path / name, seed=3, targets=lambda name, targets=targets: name.endswith(targets))
        for name, targets in (("some", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")), ("more", "kv_b_proj"))
    ]
    some, more = (LoRARequest(path.name, 1 + index, str(path)) for index, path in enumerate(adapters))
    prompts: Any = [{"prompt_token_ids": each} for each in random_prompts([9, 3], 97)]
    params = greedy(2, logprobs=2)
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1, **LORA}
    with LLM(str(tmp_path / "base"), **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False, lora_request=[some, None])
    with open_engine(tmp_path / "base", **LORA) as llm:
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=[some, None])
        with pytest.raises(UserError, match=r"kv_b_proj': adapters of this module are not supported"):
            llm.generate(prompts[0], params, use_tqdm=False, lora_request=more)
    assert tokens(found) == tokens(expected)
    for own, wanted in zip(bits(found), bits(expected), strict=True):
        for entry, known in zip(own, wanted, strict=True):
            assert entry == pytest.approx(known, abs=1e-3)
