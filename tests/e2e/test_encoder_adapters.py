"""Adapters of encoders, with heads of their own where they classify: as Transformers and PEFT compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from quire import LLM, LoRARequest, PoolingParams
from quire.cli.memory_plan import plan_engine
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import UserError
from quire.layers.adapters import TorchAdapterStorage
from quire.models.adapters import ModelAdapters
from quire.models.loader import Extras, load_model
from quire.parallel.single import SINGLE_RANK
from tests.e2e.test_adapters import PROMPTS
from tests.e2e.test_classifier_adapters import config_of
from tests.engine.test_pooling_models import save_encoder
from tests.fakes.adapters import PREFIX, Tensors, merged, write, write_adapter
from tests.long import all_but_long
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize
from tests.test_llm_pooling import QUIET, TEXTS, save_with_tokenizer, tokens_of

RAW = PoolingParams(use_activation=False, normalize=False)
TOKENS: Any = [{"prompt_token_ids": each} for each in PROMPTS]
METHODS = {"mean_tokens": lambda states: states.mean(0), "cls_token": lambda states: states[0]}
SAVED = ["classifier", "score"]
"""As PEFT names them for every classifier."""
CLASSIFIER = f"{PREFIX}classifier"
write_with_head = partial(write_adapter, modules_to_save=SAVED)


def adapted(directory: Path, **options: Any) -> LLM:
    given = {"enable_lora": True, "max_loras": 2, "num_threads": 1, "skip_tokenizer_init": True, **options}
    return LLM(str(directory), **given)


def make(
    model: PreTrainedModel, directory: Path, write_one: Callable[..., Path] = write_adapter
) -> tuple[list[LoRARequest | None], list[PreTrainedModel]]:
    """Adapters of the prompts, two and the base, and a model for each prompt."""
    paths = [write_one(model, directory / str(seed), seed=seed) for seed in (1, 2)]
    first, second = (LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1))
    models = [merged(model, path) for path in paths]
    base = merged(model, write_adapter(model, directory / "none", targets=lambda name: False))
    return [first, None, second, first, second], [models[0], base, models[1], models[0], models[1]]


def values(llm: LLM, texts: Any, which: Any) -> list[torch.Tensor]:
    """Vectors or logits."""
    outputs = llm.encode(texts, RAW, lora_request=which, **QUIET)
    return [torch.tensor(output.outputs.data) for output in outputs]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("name", "method"),
    [("bert", "mean_tokens"), ("roberta", "cls_token"), ("modernbert", "mean_tokens"), ("modernbert", "cls_token")],
)
def test_embedders(name: str, method: str, backend: str, tmp_path: Path) -> None:
    """Of all linear layers, the unused pooler too, and of the embedding."""
    model = randomize(ENCODERS[name]())
    which, models = make(model, tmp_path, partial(write_adapter, tables=("embedding",)))
    path = save_encoder(model, tmp_path / "base", method)
    with adapted(path, attention_backend=backend) as llm:
        together = values(llm, TOKENS, which)
        alone = [values(llm, *pair)[0] for pair in zip(TOKENS, which, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True)), "the same bits in any company"
    with adapted(path, attention_backend=backend, enable_lora=False) as llm:
        assert torch.equal(values(llm, TOKENS[1], None)[0], together[1])
    for prompt, own, found in zip(PROMPTS, models, together, strict=True):
        assert found.allclose(METHODS[method](hidden_states(own, prompt)).float(), atol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", all_but_long(list(CLASSIFIERS), ["bert", "roberta"]))
def test_classifiers_with_heads(name: str, backend: str, tmp_path: Path) -> None:
    model = randomize(CLASSIFIERS[name]())
    which, models = make(model, tmp_path, write_with_head)
    path = save_encoder(model, tmp_path / "base")
    with adapted(path, attention_backend=backend) as llm:
        together = values(llm, TOKENS, which)
        alone = [values(llm, *pair)[0] for pair in zip(TOKENS, which, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True)), "the same bits in any company"
    for prompt, own, found in zip(PROMPTS, models, together, strict=True):
        assert found.allclose(class_logits(own, prompt).float(), atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_heads_of_low_rank(name: str, tmp_path: Path) -> None:
    """In slots that held whole heads, and the other way round."""
    model = randomize(CLASSIFIERS[name]())
    low, whole = write_adapter(model, tmp_path / "low", seed=3), write_with_head(model, tmp_path / "whole", seed=4)
    requests = [LoRARequest(path.name, number, str(path)) for number, path in enumerate((low, whole), 1)]
    with adapted(save_encoder(model, tmp_path / "base"), max_loras=1) as llm:
        for request in (*requests, *requests):
            expected = class_logits(merged(model, Path(request.path)), PROMPTS[0]).float()
            assert values(llm, TOKENS[0], request)[0].allclose(expected, atol=1e-4)


def test_scores_of_pairs(tmp_path: Path) -> None:
    model = randomize(CLASSIFIERS["modernbert-one"]())
    which, models = make(model, tmp_path, write_with_head)
    with adapted(save_with_tokenizer(model, tmp_path / "base"), skip_tokenizer_init=False) as llm:
        outputs = llm.score(TEXTS[0], TEXTS[1:], pooling_params=RAW, lora_request=which[:2], **QUIET)
    for text, own, output in zip(TEXTS[1:], models, outputs, strict=False):
        assert output.outputs.score == pytest.approx(float(class_logits(own, tokens_of(TEXTS[0], text))), abs=1e-4)


def test_sleep(tmp_path: Path) -> None:
    model = randomize(CLASSIFIERS["roberta"]())
    which, _ = make(model, tmp_path, write_with_head)
    with adapted(save_encoder(model, tmp_path / "base")) as llm:
        before = values(llm, TOKENS, which)
        llm.sleep(level=2)
        llm.wake_up()
        assert all(torch.equal(*pair) for pair in zip(values(llm, TOKENS, which), before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    def two_heads() -> PreTrainedModel:
        config = CLASSIFIERS[name]().config
        config.num_attention_heads = 2
        return type(CLASSIFIERS[name]())(config)

    model = randomize(two_heads())
    which, models = make(model, tmp_path, partial(write_with_head, tables=("embedding",)))
    with adapted(save_encoder(model, tmp_path / "base"), tensor_parallel_size=2) as llm:
        found = values(llm, TOKENS, which)
    for prompt, own, each in zip(PROMPTS, models, found, strict=True):
        assert each.allclose(class_logits(own, prompt).float(), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_as_peft_saves_and_computes(name: str, targets: str | None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = randomize(CLASSIFIERS[name]())
    path = save_encoder(model, tmp_path / "base")
    if name == "modernbert":
        targets = targets or ["Wqkv", "dense"]  # type: ignore[assignment]
    whole = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=9, target_modules=targets))
    for parameter, tensor in whole.named_parameters():
        if "lora_B" in parameter or "modules_to_save" in parameter:
            torch.nn.init.normal_(tensor, std=0.3)
    whole.save_pretrained(tmp_path / "adapter")
    with adapted(path) as llm:
        (found,) = values(llm, TOKENS[0], LoRARequest("adapter", 1, str(tmp_path / "adapter")))
    assert found.allclose(class_logits(whole.double(), PROMPTS[0]).float(), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {f"{CLASSIFIER}.bias": None}, "classifier.bias' is missing"),
        ("bert", {f"{CLASSIFIER}.weight": None}, "classifier.weight' is missing"),
        ("bert", {f"{CLASSIFIER}.bias": torch.ones(4)}, r"has shape \[4\], .* ask for \[3\]: num_labels"),
        ("bert", {f"{CLASSIFIER}.bias": torch.ones(3, 1)}, "not a vector of floating-point numbers"),
        ("bert", {"classifier.weight": torch.ones(3, 48), "classifier.bias": torch.ones(3)}, "'.* occurs twice"),
        ("bert", {f"{PREFIX}score.weight": torch.ones(3, 48)}, "score' is a whole head, which this model does not"),
        (
            "roberta",
            {f"{CLASSIFIER}.dense.weight": None, f"{CLASSIFIER}.dense.bias": None},
            "classifier.dense.weight' is missing",
        ),
        ("roberta", {f"{CLASSIFIER}.dense.weight": torch.ones(48, 49)}, r"has shape \[48, 49\]"),
    ],
)
def test_damaged_heads(name: str, change: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    model = randomize(CLASSIFIERS[name]())
    usual = write_with_head(model, tmp_path / "usual")
    tensors: Tensors = load_file(usual / "adapter_model.safetensors")
    kept = {key: each for key, each in {**tensors, **change}.items() if each is not None}
    damaged = write(tmp_path / "damaged", kept, config_of(usual))
    with adapted(save_encoder(model, tmp_path / "base")) as llm, pytest.raises(UserError, match=message):
        values(llm, TOKENS[0], LoRARequest("damaged", 1, str(damaged)))


def test_heads_that_an_embedder_lacks(tmp_path: Path) -> None:
    model = randomize(ENCODERS["bert"]())
    alone = write_adapter(model, tmp_path / "alone", targets=lambda name: name == "pooler.dense")
    tensors = load_file(write_adapter(model, tmp_path / "other") / "adapter_model.safetensors")
    tensors |= {name.replace("pooler", "poler"): each.clone() for name, each in tensors.items() if "pooler" in name}
    other = write(tmp_path / "other", tensors, json.loads((alone / "adapter_config.json").read_text()))
    with adapted(save_encoder(model, tmp_path / "base")) as llm:
        with pytest.raises(UserError, match="all of heads that this model lacks"):
            values(llm, TOKENS[0], LoRARequest("alone", 1, str(alone)))
        with pytest.raises(UserError, match=r"poler\.dense' does not belong"):
            values(llm, TOKENS[0], LoRARequest("other", 2, str(other)))


@pytest.mark.parametrize("make", [*ENCODERS.values(), *CLASSIFIERS.values()], ids=[*ENCODERS, *CLASSIFIERS])
def test_the_memory_that_a_plan_counts(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    path = save_encoder(make(), tmp_path)
    options = {"model": str(path), "enable_lora": True, "skip_tokenizer_init": True, "attention_backend": "torch"}
    config = resolve(EngineOptions.from_keywords(options))
    storage = TorchAdapterStorage(1, config.adapters.max_rank, torch.float32, torch.device("cpu"))
    adapters = ModelAdapters(config.adapters, storage)
    load_model(config.model, config.load, SINGLE_RANK, extras=Extras(adapters=adapters))
    counted = plan_engine(config, 2**34, ()).adapter_bytes
    assert adapters.reserved_bytes() <= counted <= 1.6 * adapters.reserved_bytes()
