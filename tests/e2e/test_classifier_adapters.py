"""Adapters of classifiers, of their layers and with a head of their own: as Transformers and PEFT compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from quire.errors import UserError
from quire.llm import LLM
from quire.lora_request import LoRARequest
from tests.e2e.test_adapters import PROMPTS, SMALL
from tests.fakes.adapters import PREFIX, Tensors, merged, write, write_adapter
from tests.models.harness import randomize

LABELS = 3
SAVED = {"modules_to_save": ["classifier", "score"]}
"""As PEFT writes it for every classifier."""
NAMES = [f"{PREFIX}score.weight", f"{PREFIX}score.modules_to_save.default.weight", "score.weight"]
TEXTS: Any = [{"prompt_token_ids": each} for each in PROMPTS]


class Tiny(NamedTuple):
    model: PreTrainedModel
    directory: Path
    requests: list[LoRARequest]


def classifier() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=LABELS,
        pad_token_id=None,
    )
    return randomize(LlamaForSequenceClassification(config))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A classifier with two adapters that have heads, under three names, and one without."""
    directory, model = tmp_path_factory.mktemp("tiny"), classifier()
    model.save_pretrained(directory / "base")
    paths = [with_head(model, directory / str(seed), seed, name) for seed, name in enumerate(NAMES, 1)]
    paths.append(write_adapter(model, directory / "without", seed=9, targets=lambda name: name != "score"))
    requests = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]
    return Tiny(model, directory / "base", requests)


def with_head(model: PreTrainedModel, directory: Path, seed: int, name: str = NAMES[0]) -> Path:
    path = write_adapter(model, directory, seed=seed, targets=lambda name: name != "score", **SAVED)
    head = torch.randn(LABELS, 64, generator=torch.Generator().manual_seed(seed)) * 0.3
    return write(path, {**load_file(path / "adapter_model.safetensors"), name: head}, config_of(path))


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return found


def pooler(directory: Path, **options: Any) -> LLM:
    given = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16, "max_model_len": 128, **SMALL, **options}
    return LLM(str(directory), **given)


def wanted(model: PreTrainedModel, request: LoRARequest | None, prompt: list[int]) -> torch.Tensor:
    """Probabilities of the labels by Transformers."""
    whole = model.double() if request is None else merged(model, Path(request.path))
    tensors = {} if request is None else load_file(Path(request.path) / "adapter_model.safetensors")
    with torch.no_grad():
        for name in NAMES:
            if name in tensors:
                whole.score.weight.copy_(tensors[name])
        return whole(torch.tensor([prompt])).logits[0].softmax(-1).float()


@pytest.mark.parametrize("options", [{"attention_backend": "native"}, {"attention_backend": "torch"}])
def test_heads_of_adapters_and_the_base_in_one_step(tiny: Tiny, options: dict[str, Any]) -> None:
    first, second, third, without = tiny.requests
    which = [first, None, second, without, third]
    with pooler(tiny.directory, **options) as llm:
        found = llm.classify(TEXTS, lora_request=which, use_tqdm=False)
        alone = [
            llm.classify(text, lora_request=request, use_tqdm=False)[0]
            for text, request in zip(TEXTS, which, strict=True)
        ]
    assert [each.outputs.probs for each in found] == [each.outputs.probs for each in alone]
    with pooler(tiny.directory, enable_lora=False, **options) as llm:
        assert llm.classify(TEXTS[1], use_tqdm=False)[0].outputs.probs == found[1].outputs.probs
    for prompt, request, output in zip(PROMPTS, which, found, strict=True):
        assert torch.tensor(output.outputs.probs).allclose(wanted(tiny.model, request, prompt), atol=1e-4)


def test_low_rank_heads_and_slots(tiny: Tiny, tmp_path: Path) -> None:
    """A head's matrices of low rank, in the slot that a whole head had before."""
    low = LoRARequest("low", 8, str(write_adapter(tiny.model, tmp_path / "low", seed=4)))
    with pooler(tiny.directory, max_loras=1) as llm:
        for request in (tiny.requests[0], low, tiny.requests[3], tiny.requests[0]):
            (output,) = llm.classify(TEXTS[0], lora_request=request, use_tqdm=False)
            expected = wanted(tiny.model, request, PROMPTS[0])
            assert torch.tensor(output.outputs.probs).allclose(expected, atol=1e-4)


def test_sleep(tiny: Tiny) -> None:
    with pooler(tiny.directory) as llm:
        before = llm.classify(TEXTS[0], lora_request=tiny.requests[0], use_tqdm=False)[0].outputs.probs
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.classify(TEXTS[0], lora_request=tiny.requests[0], use_tqdm=False)[0].outputs.probs == before


@pytest.mark.long
def test_two_ranks(tiny: Tiny) -> None:
    """Every rank has the whole head."""
    with pooler(tiny.directory, tensor_parallel_size=2) as llm:
        found = llm.classify(TEXTS[:2], lora_request=[tiny.requests[0], None], use_tqdm=False)
    for prompt, request, output in zip(PROMPTS, (tiny.requests[0], None), found, strict=False):
        assert torch.tensor(output.outputs.probs).allclose(wanted(tiny.model, request, prompt), atol=1e-4)


@pytest.mark.long
def test_two_stages(tiny: Tiny) -> None:
    """The bits of one rank, in a process of its own: torch multiplies with heads, there without the tests' products."""
    which = [tiny.requests[0], None, *tiny.requests[1:]]
    found = []
    for options in ({"distributed_executor_backend": "mp"}, {"pipeline_parallel_size": 2}):
        with pooler(tiny.directory, **options) as llm:
            found.append([each.outputs.probs for each in llm.classify(TEXTS, lora_request=which, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            lambda tensors: {**tensors, NAMES[0]: torch.ones(4, 64)},
            SAVED,
            r"has shape \[4, 64\], where .* \[3, 64\]: num",
        ),
        (lambda tensors: {**tensors, NAMES[0]: torch.full((3, 64), torch.nan)}, SAVED, "infinite numbers or NaN"),
        (lambda tensors: {**tensors, f"{PREFIX}score.bias": torch.ones(3)}, SAVED, "score.bias': biases are not"),
        (lambda tensors: {**tensors, f"{PREFIX}classifier.weight": torch.ones(3, 64)}, SAVED, "classifier' is a whole"),
        (lambda tensors: {**tensors, NAMES[1]: torch.ones(3, 64)}, SAVED, "score.* occurs twice"),
        (lambda tensors: tensors, {"modules_to_save": None}, "score.weight': it is no matrix of an adapter"),
        (
            lambda tensors: {**tensors, f"{PREFIX}score.lora_A.weight": torch.ones(8, 64)},
            SAVED,
            "lora_B.weight' is missing",
        ),
        (
            lambda tensors: {
                **tensors,
                f"{PREFIX}score.lora_A.weight": torch.ones(8, 64),
                f"{PREFIX}score.lora_B.weight": torch.ones(3, 8),
            },
            SAVED,
            "has matrices of low rank too",
        ),
        (lambda tensors: {key: each for key, each in tensors.items() if "score" not in key}, SAVED, "has no tensors"),
        (lambda tensors: tensors, {"modules_to_save": ["lm_head"]}, "'lm_head' name its matrix in target_modules"),
    ],
)
def test_refused_heads(
    tiny: Tiny, tmp_path: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any], message: str
) -> None:
    usual = Path(tiny.requests[0].path)
    tensors = change(load_file(usual / "adapter_model.safetensors"))
    directory = write(tmp_path / "changed", tensors, {**config_of(usual), **config})
    with pooler(tiny.directory) as llm, pytest.raises(UserError, match=message) as caught:
        llm.classify(TEXTS[0], lora_request=LoRARequest("changed", 9, str(directory)), use_tqdm=False)
    assert str(directory) in str(caught.value)


@pytest.mark.long
def test_as_peft_saves_and_computes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = classifier()
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=9))
    for name, tensor in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(tensor, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    with pooler(tmp_path / "base") as llm:
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        (output,) = llm.classify(TEXTS[0], lora_request=request, use_tqdm=False)
    with torch.no_grad():
        expected = adapted.double()(torch.tensor([PROMPTS[0]])).logits[0].softmax(-1).float()
    assert torch.tensor(output.outputs.probs).allclose(expected, atol=1e-4)
