"""Loading adapters: every tensor finds its layer, or the load fails and names it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import content_digest, open_adapter
from quire.config.adapters import AdaptersConfig
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.config.peft import read_peft_config
from quire.config.pooling import PoolingConfig
from quire.errors import ModelLoadError, QuireError, UserError
from quire.layers.adapters import TorchAdapterStorage
from quire.models.adapters import ModelAdapters, read_matrices
from quire.models.loader import Extras, load_model
from quire.parallel.single import SINGLE_RANK
from tests.fakes.adapters import PREFIX, Tensors, stacked_names, write, write_adapter
from tests.models.families import FAMILIES, deepseek_v3, mixtral, qwen3
from tests.models.harness import randomize, save
from tests.models.hybrid_families import HYBRID_FAMILIES

LIMITS = AdaptersConfig(max_running=1, max_rank=16, num_slots=1)
MODEL = randomize(qwen3(num_hidden_layers=1))
ATTENTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> ModelAdapters:
    return adapters_of(save(MODEL, tmp_path_factory.mktemp("base")))


def adapters_of(directory: Path, limits: AdaptersConfig = LIMITS) -> ModelAdapters:
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    found = ModelAdapters(limits, TorchAdapterStorage(1, 16, torch.float32, torch.device("cpu")))
    load_model(config, LoadConfig("auto", 0), SINGLE_RANK, extras=Extras(adapters=found))
    return found


def load(adapters: ModelAdapters, directory: Path) -> None:
    adapters.load(1, AdapterRef(str(directory), content_digest(directory)))


def num_loaded(adapters: ModelAdapters) -> int:
    return sum(len(stack.stored.get(1, ())) for stack, _ in adapters.layers.stacks)


def parts(directory: Path) -> tuple[Tensors, dict[str, Any]]:
    return load_file(directory / "adapter_model.safetensors"), json.loads(
        (directory / "adapter_config.json").read_text()
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.removeprefix(PREFIX + "model."),
        lambda name: PREFIX + name.removeprefix(PREFIX + "model."),
        lambda name: name.replace(PREFIX + "model.", PREFIX + "language_model.model."),
        lambda name: name.replace(PREFIX + "model.", PREFIX + "model.language_model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace(".weight", ""),
    ],
)
def test_usual_names(adapters: ModelAdapters, tmp_path: Path, rename: Callable[[str], str]) -> None:
    tensors, config = parts(write_adapter(MODEL, tmp_path / "as PEFT writes it"))
    load(adapters, write(tmp_path / "renamed", {rename(name): each for name, each in tensors.items()}, config))
    assert num_loaded(adapters) == 7


def test_bin_files(adapters: ModelAdapters, tmp_path: Path) -> None:
    directory = write_adapter(MODEL, tmp_path / "adapter")
    torch.save(load_file(directory / "adapter_model.safetensors"), directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").unlink()
    load(adapters, directory)
    assert num_loaded(adapters) == 7


def test_some_layers_alone(adapters: ModelAdapters, tmp_path: Path) -> None:
    load(adapters, write_adapter(MODEL, tmp_path / "all"))
    few = write_adapter(MODEL, tmp_path / "few", targets=lambda name: name.endswith("v_proj"), layers_to_transform=[0])
    load(adapters, few)
    assert num_loaded(adapters) == 1, "what the slot held before is gone"


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (partial(qwen3, num_hidden_layers=1), 1.0),
        (FAMILIES["gpt2"], 1.4),
        (FAMILIES["phi3"], 1.6),
        (lambda: mixtral(2, 1), 1.0),
        (HYBRID_FAMILIES["qwen3-next"], 1.1),
        (HYBRID_FAMILIES["qwen3.5"], 1.0),
        (deepseek_v3, 1.5),
    ],
    ids=["qwen3", "gpt2", "phi3", "mixtral", "qwen3-next", "qwen3.5", "deepseek-v3"],
)
def test_the_memory_of_slots_is_what_the_shape_says(
    tmp_path: Path, make: Callable[[], PreTrainedModel], most: float
) -> None:
    """`quire plan` counts what an engine keeps; more where a checkpoint has several matrices in one."""
    directory = save(randomize(make()), tmp_path)
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    limits = AdaptersConfig(max_running=1, max_rank=16, num_slots=3, dtype="bfloat16")
    kept = adapters_of(directory, limits).reserved_bytes()
    shape = config.resolved_shape()
    counted = shape.adapter_elements + shape.table_adapter_elements + shape.expert_adapter_elements
    assert kept <= limits.slot_bytes(counted) <= most * kept
    few = replace(limits, target_modules=("q_proj", "v_proj"))
    assert not few.allows_experts
    assert adapters_of(directory, few).reserved_bytes() < kept


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: each for key, each in tensors.items() if key != name}


def added(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(*shape)}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (dropped(f"{PREFIX}{ATTENTION}.lora_B.weight"), {}, r"q_proj.lora_B.weight' is missing"),
        (
            added(f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight", 8, 48),
            {},
            r"layers.9.mlp.up_proj.lora_B.*missing",
        ),
        (added(f"{PREFIX}{ATTENTION}.lora_magnitude_vector", 96), {}, "DoRA's magnitudes are not supported"),
        (added(f"{PREFIX}model.embed_tokens.lora_embedding_A", 8, 97), {}, "lora_embedding_B' is missing"),
        (
            added(f"{PREFIX}model.embed_tokens.base_layer.weight", 97, 48),
            {},
            "base_layer.weight' is not the base's own",
        ),
        (added(f"{PREFIX}lm_head.base_layer.weight", 98, 48), {}, "base_layer.weight' is not the base's own"),
        (added(f"{PREFIX}{ATTENTION}.base_layer.weight", 96, 48), {}, "holds a tensor of the base"),
        (
            lambda tensors: {key.replace(".lora_", ".lora_embedding_"): each for key, each in tensors.items()},
            {},
            "this module's matrices are lora_A and lora_B",
        ),
        (added(f"{PREFIX}{ATTENTION}.lora_B.bias", 96), {}, "biases are not supported"),
        (added(f"{PREFIX}{ATTENTION}.weight", 96, 48), {}, "no matrix of an adapter"),
        (added(f"{PREFIX}lm_head.modules_to_save.weight", 96, 48), {}, "whole modules beside the matrices"),
        (
            lambda tensors: tensors,
            {"r": 4},
            r"has shape \[8, 100\], where the model and rank 4 of .* ask for \[4, 100\]",
        ),
        (lambda tensors: tensors, {"rank_pattern": {"q_proj": 3}}, r"ask for \[3, 48\]"),
        (lambda tensors: tensors, {"target_modules": ["q_proj", "qkv"]}, "target_modules names 'qkv'"),
        (lambda tensors: {key: each.long() for key, each in tensors.items()}, {}, "not a matrix of floating-point"),
        (lambda tensors: {key: each * torch.nan for key, each in tensors.items()}, {}, "infinite numbers or NaN"),
        (
            lambda tensors: {key.replace("layers.0", "layers.1"): each for key, each in tensors.items()},
            {},
            "model.layers.1.* does not belong to this model",
        ),
        (
            lambda tensors: {**tensors, **{key.removeprefix(PREFIX): each.clone() for key, each in tensors.items()}},
            {},
            "are one",
        ),
    ],
)
def test_refused_tensors(
    adapters: ModelAdapters,
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    message: str,
) -> None:
    tensors, usual = parts(write_adapter(MODEL, tmp_path / "whole"))
    directory = write(tmp_path / "changed", change(tensors), {**usual, **config})
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(adapters, directory)
    assert str(directory) in str(caught.value)
    assert num_loaded(adapters) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_the_base_beside_its_adapters(tmp_path: Path, tied: bool) -> None:
    """PEFT saves embedding and head with their adapters: they must be the base's own."""
    model = randomize(qwen3(num_hidden_layers=1, tie_word_embeddings=tied))
    found = adapters_of(save(model, tmp_path / "base"))
    tensors, config = parts(write_adapter(model, tmp_path / "plain", tables=("head", "embedding")))
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tensors[f"{PREFIX}lm_head.base_layer.weight"] = head.detach().clone()
    tensors[f"{PREFIX}model.embed_tokens.base_layer.weight"] = table.detach().bfloat16()
    load(found, write(tmp_path / "whole", tensors, config))
    assert num_loaded(found) == 8, "the embedding's is none of a stack"
    tensors[f"{PREFIX}lm_head.base_layer.weight"][96, 47] += 1
    with pytest.raises(ModelLoadError, match=r"lm_head.base_layer.weight' is not the base's own"):
        load(found, write(tmp_path / "changed", tensors, config))


def test_a_model_that_pools_has_no_head(tmp_path: Path) -> None:
    directory = save(MODEL, tmp_path / "base")
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    found = ModelAdapters(LIMITS, TorchAdapterStorage(1, 16, torch.float32, torch.device("cpu")))
    load_model(
        replace(config, pooling=PoolingConfig("embed", "last")),
        LoadConfig("auto", 0),
        SINGLE_RANK,
        extras=Extras(adapters=found),
    )
    with pytest.raises(ModelLoadError, match="lm_head': adapters of this module are not supported"):
        load(found, write_adapter(MODEL, tmp_path / "adapter", tables=("head",)))


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            lambda tensors: {key: each[:-1] if "lora_A" in key else each for key, each in tensors.items()},
            {},
            r"experts.base_layer.lora_A.weight' has shape \[23, 48\], where the model and rank 8 .* ask for \[24, 48\]",
        ),
        (lambda tensors: tensors, {"rank_pattern": {"experts.down_proj": 5}}, r"experts.lora_A.* ask for \[15, \d+\]"),
        (
            lambda tensors: tensors,
            {"target_parameters": ["experts.down_proj"]},
            "names 1 of its parameters gate_up_proj and down_proj",
        ),
        (lambda tensors: tensors, {"target_parameters": None}, "names 0 of its parameters"),
        (
            lambda tensors: tensors,
            {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "norm.weight"]},
            "target_parameters names 'norm.weight'",
        ),
        (added(f"{PREFIX}{EXPERTS}.base_layer.base_layer.lora_A.weight", 24, 48), {}, "lora_B.weight' is missing"),
        (
            lambda tensors: {
                **tensors,
                f"{PREFIX}{EXPERTS}.2.w1.lora_A.weight": torch.ones(8, 48),
                f"{PREFIX}{EXPERTS}.2.w1.lora_B.weight": torch.ones(36, 8),
            },
            {},
            r"experts\S+ and \S+experts\S+ are one",
        ),
        (
            lambda tensors: {key.replace(".experts.", ".experts.3.w1."): each for key, each in tensors.items()},
            {},
            r"experts.3.w1.* does not belong to this model",
        ),
        (lambda tensors: {key: each * torch.nan for key, each in tensors.items()}, {}, "infinite numbers or NaN"),
    ],
)
def test_refused_experts(
    tmp_path: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any], message: str
) -> None:
    model = randomize(mixtral(3, 1, num_hidden_layers=1))
    found = adapters_of(save(model, tmp_path / "base"))
    whole = write_adapter(model, tmp_path / "whole", targets=lambda name: False, experts=stacked_names)
    load(found, whole)
    assert num_loaded(found) == 3 * 3, "matrices of three experts"
    tensors, usual = parts(whole)
    directory = write(tmp_path / "changed", change(tensors), {**usual, **config})
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(found, directory)
    assert str(directory) in str(caught.value)
    assert num_loaded(found) == 0


def test_experts_that_may_be_changed(tmp_path: Path) -> None:
    """By the name of the matrices, or of all experts."""
    model = randomize(mixtral(3, 1, num_hidden_layers=1))
    directory = save(model, tmp_path / "base")
    whole = write_adapter(model, tmp_path / "whole", targets=lambda name: False, experts=stacked_names)
    for names in (("experts",), ("gate_up_proj", "down_proj")):
        limits = AdaptersConfig(max_running=1, max_rank=16, num_slots=1, target_modules=names)
        assert limits.allows_experts
        load(adapters_of(directory, limits), whole)
    with pytest.raises(ModelLoadError, match="lora_target_modules leaves out: gate_up_proj may be changed"):
        load(adapters_of(directory, replace(LIMITS, target_modules=("gate_up_proj",))), whole)


def test_modules_that_may_be_changed(tmp_path: Path) -> None:
    limits = AdaptersConfig(max_running=1, max_rank=16, num_slots=1, target_modules=("q_proj", "v_proj"))
    found = adapters_of(save(MODEL, tmp_path / "base"), limits)
    load(found, write_adapter(MODEL, tmp_path / "few", targets=lambda name: name.endswith(("q_proj", "v_proj"))))
    with pytest.raises(ModelLoadError, match="lora_target_modules leaves out: q_proj, v_proj may be changed"):
        load(found, write_adapter(MODEL, tmp_path / "all"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"target_parameters": "experts.gate_up_proj"}, "target_parameters must be a list of names"),
        ({"r": 0}, "r must be an integer of at least 1"),
        ({"r": "8"}, "r must be an integer"),
        ({"lora_alpha": None}, "'lora_alpha' is missing"),
        ({"rank_pattern": {"(": 3}}, "is no regular expression"),
        ({"rank_pattern": {"(a+)+": 3}}, "repeats a repetition"),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64 needs max_lora_rank"),
        ({"alpha_pattern": {"q_proj": -1}}, "must be a number greater than zero"),
        ({"target_modules": 7}, "target_modules must be a list of names"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
    ],
)
def test_refused_configurations(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = write_adapter(MODEL, tmp_path / "adapter", **config)
    with pytest.raises(UserError, match=message):
        open_adapter(str(directory), LIMITS)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
@pytest.mark.parametrize("targets", [None, "all-linear", r".*\.q_proj", ["q_proj"]])
def test_accepted_configurations(tmp_path: Path, init: Any, targets: Any) -> None:
    config = {"init_lora_weights": init, "target_modules": targets, "fan_in_fan_out": True, "modules_to_save": None}
    open_adapter(str(write_adapter(MODEL, tmp_path / "adapter", **config)), LIMITS)


def test_patterns_match_as_in_peft(tmp_path: Path) -> None:
    """The first one that fits the end of a module's name counts."""
    directory = write_adapter(
        MODEL,
        tmp_path / "adapter",
        rank_pattern={"0.self_attn.q_proj": 4, "q_proj": 6, r"layers\.\d+\.mlp.*": 2},
        alpha_pattern={"^model.layers.1.self_attn.q_proj": 32},
    )
    config = read_peft_config(directory)
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 4
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 6
    assert config.rank_of("model.layers.1.self_attn.mq_proj") == 8
    assert config.rank_of("model.layers.1.mlp.up_proj") == 2
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 32 / 6


def damages(directory: Path) -> Iterator[int]:
    """Damage an adapter's files in 60 ways, one after the other."""
    draw = random.Random(7)
    weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    whole, text = weights.read_bytes(), config.read_bytes()
    for kind in range(60):
        content, written = bytearray(whole), bytearray(text)
        if kind < 20:  # cut off
            del content[draw.randrange(len(content)) :]
        elif kind < 40:  # bytes of the header
            for _ in range(3):
                content[draw.randrange(8, 400)] = draw.randrange(256)
        elif kind < 50:  # its length
            content[:8] = draw.randrange(2**64).to_bytes(8, "little")
        else:  # the configuration
            del written[draw.randrange(len(written) - 1) :]
        weights.write_bytes(content)
        config.write_bytes(written)
        yield kind


def test_damaged_adapters(adapters: ModelAdapters, tmp_path: Path) -> None:
    """Each gives an error of one line, or is whole all the same: bytes of a header may mean as much."""
    directory = write_adapter(MODEL, tmp_path / "adapter")
    errors = []
    for _ in damages(directory):
        try:
            adapters.load(1, open_adapter(str(directory), LIMITS))
        except QuireError as error:
            errors.append(str(error))
    assert len(errors) >= 55
    assert all(re.fullmatch(r"[^\n]+", error) for error in errors)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="holds no tensors"):
        read_matrices(tmp_path / "adapter_model.safetensors")
