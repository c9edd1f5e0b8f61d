"""Pooling of a text's hidden states to a vector or its labels' logits. Settings come from sentence-transformers' files,
for classifiers from config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.hf_json import Fields, read_optional_json, shown
from quire.errors import ConfigError, ModelLoadError
from quire.utils.model_files import file_bytes, read_model_file

RUNNERS = ("auto", "generate", "pooling")
CLASSIFIER = "ForSequenceClassification"
MAX_MODULES_BYTES = 2**16
MAX_LABELS = 4096
MAX_FEATURES = 2**16
"""Largest width of a linear layer over vectors."""

Method = Literal["last", "cls", "mean"]
Task = Literal["embed", "classify"]
Activation = Literal["identity", "sigmoid", "softmax"]

_METHODS: dict[str, Method | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
"""sentence-transformers' flag -> method; None: not supported."""
_NAMES: dict[str, Method] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_VECTOR = "sentence_embedding"
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
"""torch's activation class -> name of its function here."""


@dataclass(frozen=True)
class DenseModule:
    """Linear layer over pooled vectors. folder: folder of its weights, beside the model's. activation: "tanh", a name
    of `kernels/activation.py`, or None."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str | None


@dataclass(frozen=True)
class PoolingConfig:
    """Pooling model's settings. task: "embed" makes a vector, "classify" the logits of `labels`. method: pooled states:
    the last token's, the first's ("cls"), or the mean. normalize: default of scaling to length 1. dense: layers that
    the vector passes before. activation: from logits to probabilities. dimensions: lengths to which a vector may be
    cut; empty: every length with `any_dimensions`, else none. prompt: before each embedded text. prompts: (name, text)
    that a request may choose."""

    task: Task
    method: Method
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    dense: tuple[DenseModule, ...] = ()
    prompt: str = ""
    prompts: tuple[tuple[str, str], ...] = ()


def read_pooling(
    path: Path, fields: Fields, architecture: str, runner: str, *, is_encoder: bool, stated: Method | None = None
) -> PoolingConfig | None:
    """Pooling of a directory's or GGUF file's model; None for one that generates. is_encoder: it attends in both
    directions. stated: method named by a GGUF file. runner: option of EngineOptions; "auto" pools if files describe
    pooling, or the model cannot generate. Raises ModelLoadError for unsupported files, ConfigError for an impossible
    runner."""
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    is_causal = not (is_encoder or is_bare or architecture.endswith(CLASSIFIER))
    modules = None if path.is_file() else _modules(path)
    if runner == "generate":
        if not is_causal:
            raise ConfigError(f"runner='generate' is not possible: {architecture} generates no text", param="runner")
        return None
    if is_causal and runner == "auto" and modules is None and stated is None:
        return None
    usual: Method = "cls" if is_encoder else "last"
    if path.is_file():
        return PoolingConfig("embed", stated or usual)
    if architecture.endswith(CLASSIFIER):
        return _classifier(fields, is_encoder)
    matryoshka = fields.values.get("matryoshka_dimensions") or ()
    method: Method | None = None if modules is None else _method(path)
    method = method or usual
    return PoolingConfig(
        "embed",
        method,
        normalize=modules is None or any(kind == "Normalize" for kind, _ in modules),
        dimensions=_whole_numbers(fields, "matryoshka_dimensions", matryoshka),
        any_dimensions=fields.boolean("is_matryoshka", False),
        dense=tuple(_dense(path, folder) for kind, folder in modules or () if kind == "Dense"),
        prompt=_default_prompt(path, method),
        prompts=_prompts(path, fields),
    )


def longest_text(path: Path, limit: int) -> int:
    """Longest text in tokens, special ones included, by sentence-transformers' files; at most `limit`. It becomes
    `max_model_len`."""
    if path.is_file():
        return limit
    file = path / "sentence_bert_config.json"
    said = Fields(read_optional_json(file), str(file)).optional_integer("max_seq_length")
    return limit if said is None else min(said, limit)


def _classifier(fields: Fields, is_encoder: bool) -> PoolingConfig:
    named = fields.values.get("id2label")
    if named is None:
        labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    else:
        if not isinstance(named, dict) or not 0 < len(named) <= MAX_LABELS:
            raise fields.error(f"id2label must name up to {MAX_LABELS} labels, not {shown(named)}")
        by_number = {str(number): name for number, name in named.items()}
        if not all(isinstance(by_number.get(str(number)), str) for number in range(len(by_number))):
            raise fields.error("id2label must name the labels 0, 1, ... in words")
        labels = tuple(by_number[str(number)] for number in range(len(by_number)))
    method: Method = "last"
    if is_encoder:
        method = "mean" if fields.choice("classifier_pooling", ("cls", "mean"), "cls") == "mean" else "cls"
    return PoolingConfig("classify", method, False, labels, _activation(fields, len(labels)))


def _activation(fields: Fields, num_labels: int) -> Activation:
    trained = fields.values.get("sentence_transformers")
    named = trained.get("activation_fn") if isinstance(trained, dict) else None
    named = named or fields.values.get("sbert_ce_default_activation_function")
    if named is not None:
        kinds: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}
        kind = kinds.get(str(named).rpartition(".")[2])
        if kind is None:
            raise fields.error(f"the activation {shown(named)} of the classifier is not supported")
        return kind
    problem = fields.values.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"


def _modules(path: Path) -> list[tuple[str, str]] | None:
    """(class name, folder) of each module in modules.json; None without a Pooling in it."""
    file = path / "modules.json"
    if file_bytes(file) is None:
        return None
    try:
        listed: Any = json.loads(read_model_file(file, MAX_MODULES_BYTES))
        modules = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelLoadError(f"{file} must list modules with a type each") from None
    names = [name for name, _ in modules]
    if "Pooling" not in names:
        return None
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise ModelLoadError(f"{file}: the module {shown(unknown[0])} is not supported")
    if names != sorted(names, key=_MODULES.index) or any(names.count(name) > 1 for name in _MODULES if name != "Dense"):
        raise ModelLoadError(
            f"{file}: modules are supported in the order {', '.join(_MODULES)}, not {', '.join(names)}"
        )
    return modules


def _dense(path: Path, folder: str) -> DenseModule:
    if not folder or Path(folder).name != folder or folder == "..":
        raise ModelLoadError(f"{path / 'modules.json'}: {shown(folder)} is no name of a folder")
    file = path / folder / "config.json"
    fields = Fields(read_optional_json(file), str(file))
    for key in ("module_input_name", "module_output_name"):
        fields.choice(key, (_VECTOR,), _VECTOR)
    named = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if named not in _ACTIVATIONS:
        raise fields.error(f"activation_function {shown(named)} is not supported (known: {', '.join(_ACTIVATIONS)})")
    return DenseModule(
        folder,
        fields.integer("in_features", maximum=MAX_FEATURES),
        fields.integer("out_features", maximum=MAX_FEATURES),
        fields.boolean("bias", True),
        _ACTIVATIONS[named],
    )


def _method(path: Path) -> Method:
    file = path / "1_Pooling" / "config.json"
    values = read_optional_json(file)
    named = values.get("pooling_mode")
    if named is not None:
        if named not in _NAMES:
            raise ModelLoadError(f"{file}: pooling_mode {shown(named)} is not supported (known: {', '.join(_NAMES)})")
        return _NAMES[named]
    chosen = [flag for flag in _METHODS if values.get(flag) is True]
    method = _METHODS[chosen[0]] if len(chosen) == 1 else None
    if method is None:
        raise ModelLoadError(
            f"{file}: pooling by {', '.join(chosen) or 'nothing'} is not supported (known: cls, mean and last token)"
        )
    return method


def _prompts(path: Path, fields: Fields) -> tuple[tuple[str, str], ...]:
    for found in (
        fields.values.get("task_instructions"),
        read_optional_json(path / "config_sentence_transformers.json").get("prompts"),
    ):
        if isinstance(found, dict) and found:
            return tuple((name, text) for name, text in found.items() if isinstance(text, str))
    return ()


def _default_prompt(path: Path, method: Method) -> str:
    file = path / "config_sentence_transformers.json"
    values = read_optional_json(file)
    name, prompts = values.get("default_prompt_name"), values.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ModelLoadError(f"{file}: default_prompt_name {shown(name)} must be one of the prompts")
    says_without = read_optional_json(path / "1_Pooling" / "config.json").get("include_prompt") is False
    if prompt and says_without and method == "mean":
        raise ModelLoadError(
            f"{path / '1_Pooling' / 'config.json'}: a mean without the tokens of the default prompt "
            "(include_prompt: false) is not supported"
        )
    return prompt


def _whole_numbers(fields: Fields, key: str, listed: object) -> tuple[int, ...]:
    if not isinstance(listed, Sequence) or not all(type(each) is int and each > 0 for each in listed):
        raise fields.error(f"{key} must list numbers of elements, not {shown(listed)}")
    return tuple(listed)
