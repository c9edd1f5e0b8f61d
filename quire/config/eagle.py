"""Heads for drafts (EAGLE, EAGLE-3), and the model of a `speculators` checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from quire.config.hf_config import read_directory_config
from quire.config.hf_json import Fields, shown
from quire.config.model import MAX_WIDTH, ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculation_keys import OPTION
from quire.errors import ConfigError

EAGLE_METHODS = ("eagle", "eagle3")
MAX_TAPS = 16
_SPECULATORS = "speculators_config"
_CLASSES = MappingProxyType({"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"})
"""`model_type` of a head -> class whose layer it has."""
_USUAL: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": {"max_position_embeddings": 2048, "intermediate_size": 11008},
        "qwen3": {"max_position_embeddings": 32768, "intermediate_size": 22016, "num_key_value_heads": 32},
    }
)
"""Values of Transformers' classes, which `speculators` checkpoints leave out."""
_USUAL_OF_ALL = MappingProxyType({"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 1})


@dataclass(frozen=True)
class EagleConfig:
    """Head for drafts with a checkpoint of its own. method: one of EAGLE_METHODS. layers: model's layers whose inputs a
    head of "eagle3" reads; empty: the model's results. read_size: elements of each. vocab_size: rows of its embedding.
    draft_vocab_size: tokens that it can guess. norm_before_residual, norm_before_fc, fc_norm, norm_output: norms of its
    hidden state before the residual, of all that it reads, of each input, of results fed back."""

    method: str
    layers: tuple[int, ...]
    read_size: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        """Model's layers, from 0, whose outputs the head reads."""
        return tuple(layer - 1 for layer in self.layers)

    @property
    def width(self) -> int:
        """Elements of a token's hidden states that the head reads."""
        return self.read_size * max(1, len(self.layers))


def head_method(raw: Mapping[str, Any]) -> str:
    """Method of the head in a config.json, "eagle" or "eagle3"; "": a whole model. Raises ConfigError for other
    heads."""
    kind = raw.get("speculators_model_type")
    if kind is not None or _SPECULATORS in raw:
        if kind != "eagle3":
            raise _refused(f"speculators_model_type {shown(kind)} is not supported: eagle3 is")
        return "eagle3"
    names = raw.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and "eagle" in name.lower():
            return "eagle3" if "eagle3" in name.lower() else "eagle"
    return ""


def head_values(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json of a model with the head's layer, to be read like a draft model's. Raises ModelLoadError for heads
    with other layers."""
    inner = raw.get("transformer_layer_config")
    is_inner = isinstance(inner, Mapping)
    found = dict(inner) if isinstance(inner, Mapping) else dict(raw)
    kind = found.get("model_type") or ("qwen3" if is_inner else "llama")
    if kind not in _CLASSES:
        raise Fields(raw, where).error(f"a head of {shown(kind)} layers is not supported: {', '.join(_CLASSES)} are")
    if is_inner:
        found = {**_USUAL[kind], **_USUAL_OF_ALL, **found, "num_hidden_layers": 1}
        for key in ("dtype", "torch_dtype"):
            found.setdefault(key, raw.get(key))
    return found | {"model_type": kind, "architectures": [_CLASSES[kind]], "tie_word_embeddings": True}


def read_eagle(method: str, raw: Mapping[str, Any], model: ModelConfig, where: str) -> EagleConfig:
    """Read a head's configuration. Raises ModelLoadError for faults of the head's config.json, and ConfigError for a
    head of another model."""
    is_speculator = isinstance(raw.get("transformer_layer_config"), Mapping)
    inner = raw["transformer_layer_config"] if is_speculator else raw
    fields, own = Fields(raw, where), Fields(inner, where)
    vocab = own.integer("vocab_size", model.vocab_size, maximum=MAX_WIDTH)
    read = fields.optional_integer("target_hidden_size", maximum=MAX_WIDTH) or own.integer(
        "hidden_size", _USUAL_OF_ALL["hidden_size"]
    )
    for size, wanted, what in ((vocab, model.vocab_size, "vocabulary"), (read, model.hidden_size, "hidden states")):
        if size != wanted:
            raise _refused(f"the head is of a model with {what} of {size} elements, and {model.name} has {wanted}")
    for key in ("parallel_drafting", "add_para_norm", "qkv_bias"):
        if raw.get(key):
            raise fields.error(f"{key} {shown(raw[key])} is not supported")
    if method == "eagle":
        return EagleConfig(method, (), read, vocab, vocab)
    older = raw.get("eagle_config")
    older = older if isinstance(older, Mapping) else {}
    if older.get("use_aux_hidden_state", True) is not True:
        raise fields.error("eagle_config.use_aux_hidden_state must be true")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or older.get("eagle_aux_hidden_state_layer_ids")
    draft_vocab = fields.optional_integer("draft_vocab_size", maximum=vocab)
    eagle = EagleConfig(
        method,
        _layers(ids, model.num_layers, fields),
        read,
        vocab,
        draft_vocab or vocab,
        norm_before_residual=fields.boolean("norm_before_residual", is_speculator),
        norm_before_fc=fields.boolean("norm_before_fc", False),
        fc_norm=fields.boolean("fc_norm", False),
        norm_output=fields.boolean("norm_output", False),
    )
    if eagle.width == own.integer("hidden_size", _USUAL_OF_ALL["hidden_size"]):
        raise fields.error("a head that reads as many elements as its own hidden state has is not supported")
    return eagle


def _layers(ids: object, num_layers: int, fields: Fields) -> tuple[int, ...]:
    """Numbers of the model's layers whose inputs the head reads. ids: list of a config.json; None: vLLM's choice."""
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    numbers = [each for each in ids if type(each) is int] if isinstance(ids, list | tuple) else []
    if not isinstance(ids, list | tuple) or not 1 <= len(numbers) <= MAX_TAPS or len(numbers) != len(ids):
        raise fields.error(f"eagle_aux_hidden_state_layer_ids must list 1 to {MAX_TAPS} layers, not {shown(ids)}")
    if not all(1 <= number < num_layers for number in numbers):
        raise _refused(
            f"the head reads the inputs of layers {', '.join(map(str, numbers))}, which must be from 1 to "
            f"{num_layers - 1} in this model"
        )
    return tuple(numbers)


def fitting_head(head: ModelConfig, eagle: EagleConfig, model: ModelConfig, longest: int | None) -> ModelConfig:
    """`head` with the sizes of its joined inputs, for sequences as long as those of `model` (longest: as the user asks,
    None: does not)."""
    shape, first = head.shape, head.shape.layers[0]
    if eagle.method == "eagle":
        joined = ((2 * shape.hidden, shape.hidden), *first.projections)
    else:
        (size, outputs), *others = first.projections
        joined = ((eagle.width, size), (2 * size, outputs), *others)
    norms = first.num_vectors + (shape.hidden if eagle.method == "eagle3" else -shape.hidden)
    layers = (replace(first, projections=joined, num_vectors=norms), *shape.layers[1:])
    shape = replace(shape, layers=layers, vocab=eagle.draft_vocab_size)
    return replace(head, shape=shape, max_model_len=min(longest or model.max_model_len, model.max_model_len))


def with_verifier(options: EngineOptions) -> EngineOptions:
    """Options of the model that a `speculators` checkpoint is for, with that checkpoint as its head for drafts,
    where `options.model` is one; else the options themselves. Keys of `speculative_config` that are given stay."""
    raw = read_directory_config(options.model, options.revision, options.download_dir)
    stated = raw.get(_SPECULATORS)
    if not isinstance(stated, Mapping):
        return options
    method = head_method(raw)
    verifier = stated.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or not name:
        raise _refused(f"{options.model} is a head for drafts, and {_SPECULATORS} does not name its model (verifier)")
    proposals = stated.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    own: dict[str, Any] = {"method": method, "model": options.model}
    if options.revision is not None:
        own["revision"] = options.revision
    if type(count) is int:
        own["num_speculative_tokens"] = count
    given = options.speculative_config or {}
    return msgspec.structs.replace(options, model=name, revision=None, speculative_config={**own, **given})


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {reason}", param=OPTION)
