"""Slice of drafts: guessed tokens that a step verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from quire.config.checks import converted
from quire.config.eagle import EAGLE_METHODS, EagleConfig
from quire.config.model import ModelConfig
from quire.config.speculation_keys import OPTION, check_keys
from quire.errors import ConfigError, nearest_name

METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "custom_class")
"""Values of `method`. The first two are the same: drafts are looked up where the model runs."""
_OF_A_MODEL = ("draft_model", *EAGLE_METHODS)
"""Methods that the option's `model` makes drafts for."""
REFUSED = ("medusa", "mlp_speculator", "dflash", "dspark")
"""vLLM's methods that Quire does not have."""
MAX_DRAFTS, MAX_LOOKUP = 31, 64
USUAL_LOOKUP = 5


@dataclass(frozen=True)
class DraftModelConfig:
    """Draft model settings. name: option `model`. num_ranks: ranks that share its layers (None: the target's). model:
    its resolved configuration. head: inputs of a head (None: a whole model). is_parallel: PARD. mask_token: in the
    place of each draft but the last in its pass. Others: options of these names."""

    name: str
    revision: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    num_ranks: int | None = None
    model: ModelConfig | None = None
    head: EagleConfig | None = None
    is_parallel: bool = False
    mask_token: int | None = None


@dataclass(frozen=True)
class SuffixConfig:
    """Keys of `method: suffix`. depth: matched tokens and drafts together. max_texts: ended outputs kept for each
    client and cache salt. factor: most drafts for each matched token. least: least probability of a draft."""

    depth: int = 24
    max_texts: int = 10_000
    factor: float = 1.0
    least: float = 0.1


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding settings. max_drafts: most drafts of a sequence in a step. lookup_min, lookup_max: least and
    most last tokens that are looked up in texts. by_batch_size: (running sequences, most drafts of each up to that
    number), ascending; the last one also holds above it. adapts: see decision 102.
    suffix, custom_class: keys of these methods. oracle: share of right drafts in a replay of predictions (None: drafts
    are the method's)."""

    max_drafts: int = 0
    lookup_min: int = USUAL_LOOKUP
    lookup_max: int = USUAL_LOOKUP
    by_batch_size: tuple[tuple[int, int], ...] = ()
    adapts: bool = True
    draft_model: DraftModelConfig | None = None
    method: str = "ngram"
    suffix: SuffixConfig | None = None
    custom_class: str = ""
    oracle: float | None = None

    @property
    def draft(self) -> ModelConfig | None:
        """Draft model or EAGLE head, once its config.json was read; else None."""
        return None if self.draft_model is None else self.draft_model.model

    @property
    def has_layers(self) -> bool:
        """True if a model or head with own layers makes the drafts."""
        return self.method == "mtp" or self.draft_model is not None

    def head_width(self, hidden_size: int) -> int:
        """Elements of a token's hidden states that a head reads."""
        head = None if self.draft_model is None else self.draft_model.head
        if head is not None:
            return head.width
        return hidden_size if self.method == "mtp" else 0

    @property
    def reads_texts(self) -> bool:
        return self.method in ("ngram", "suffix") or self.oracle is not None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> SpeculationConfig:
        """Read `speculative_config` (None: no drafts). Raises ConfigError for unknown names and wrong values."""
        if given is None:
            return cls()
        fields = converted(OPTION, given, _Given, _Given.__struct_fields__)
        method = _method(fields)
        check_keys(given, method)
        if fields.parallel_drafting and method != "draft_model":
            raise ConfigError(
                f"{OPTION}.parallel_drafting cannot be True: a head makes drafts one behind the other", param=OPTION
            )
        suffix = _suffix(fields) if method == "suffix" else None
        most_drafts = fields.num_speculative_tokens
        if most_drafts is None:
            if suffix is None:
                raise ConfigError(f"{OPTION} lacks num_speculative_tokens", param=OPTION)
            most_drafts = min(suffix.depth, MAX_DRAFTS)
        least, most = fields.prompt_lookup_min, fields.prompt_lookup_max
        most = (least or USUAL_LOOKUP) if most is None else most
        least = most if least is None else least
        for name, value, limit in (
            ("num_speculative_tokens", most_drafts, MAX_DRAFTS),
            ("prompt_lookup_max", most, MAX_LOOKUP),
            ("prompt_lookup_min", least, most),
        ):
            if not 1 <= value <= limit:
                raise ConfigError(f"{OPTION}.{name} must be from 1 to {limit}, not {value}", param=OPTION)
        by_batch_size = _by_batch_size(fields.num_speculative_tokens_per_batch_size or [], most_drafts)
        chosen = _draft_model(fields, fields.model) if fields.model is not None and method in _OF_A_MODEL else None
        oracle = fields.oracle
        if oracle is not None and not 0 <= oracle <= 1:
            raise ConfigError(f"{OPTION}.oracle must be from 0 to 1, not {oracle:g}", param=OPTION)
        custom = _custom_class(fields) if method == "custom_class" else ""
        return cls(most_drafts, least, most, by_batch_size, fields.adaptive, chosen, method, suffix, custom, oracle)


def _by_batch_size(ranges: list[tuple[int, int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """Checked `by_batch_size` from ranges (first, last number of running sequences, drafts)."""
    name = f"{OPTION}.num_speculative_tokens_per_batch_size"
    next_first = 1
    for first, last, number in ranges:
        if first != next_first or last < first:
            raise ConfigError(
                f"{name} must be ranges [first, last, drafts] that follow one another from 1 on, not "
                f"[{first}, {last}, {number}] where one from {next_first} on is due",
                param=OPTION,
            )
        if not 0 <= number <= most:
            raise ConfigError(
                f"{name} may ask for 0 to {most} drafts (num_speculative_tokens), not {number}", param=OPTION
            )
        next_first = last + 1
    return tuple((last, number) for _, last, number in ranges)


def _method(fields: _Given) -> str:
    method = fields.method or ("" if fields.model is None else "draft_model")
    if method == "ngram_gpu":
        return "ngram"
    if method.endswith("_mtp"):  # vLLM's names for families
        return "mtp"
    if method in REFUSED:
        raise ConfigError(f"{OPTION}.method {method!r} is not supported", param=OPTION)
    if method not in METHODS:
        known, nearest = ", ".join(METHODS), nearest_name(method, METHODS)
        raise ConfigError(f"{OPTION}.method must be one of {known}, not {method!r}{nearest}", param=OPTION)
    if method in _OF_A_MODEL and fields.model is None:
        raise ConfigError(f"{OPTION}.model must name the model that makes the drafts", param=OPTION)
    return method


def _draft_model(fields: _Given, name: str) -> DraftModelConfig:
    sizes = fields.max_model_len, fields.draft_tensor_parallel_size
    if fields.max_model_len is not None and fields.max_model_len < 1:
        raise ConfigError(f"{OPTION}.max_model_len must be at least 1, not {fields.max_model_len}", param=OPTION)
    return DraftModelConfig(name, fields.revision, fields.quantization, *sizes, is_parallel=fields.parallel_drafting)


def _suffix(fields: _Given) -> SuffixConfig:
    given = {name: value for name, value in fields.suffix_keys.items() if value is not None}
    found = msgspec.convert({_SUFFIX_KEYS[name]: value for name, value in given.items()}, SuffixConfig)
    for name, value, bounds in (
        ("max_tree_depth", found.depth, (3, 64)),
        ("max_cached_requests", found.max_texts, (0, 10**9)),
        ("max_spec_factor", found.factor, (0, 64)),
        ("min_token_prob", found.least, (0, 1)),
    ):
        if not bounds[0] <= value <= bounds[1]:
            raise ConfigError(
                f"{OPTION}.suffix_decoding_{name} must be from {bounds[0]} to {bounds[1]}, not {value}", param=OPTION
            )
    return found


def _custom_class(fields: _Given) -> str:
    module, _, name = (fields.model or "").replace(":", ".").rpartition(".")
    if not module or not name:
        raise ConfigError(f"{OPTION}.model must name a class, as module.Class, not {fields.model!r}", param=OPTION)
    return f"{module}:{name}"


_SUFFIX_KEYS = MappingProxyType(
    {
        "suffix_decoding_max_tree_depth": "depth",
        "suffix_decoding_max_cached_requests": "max_texts",
        "suffix_decoding_max_spec_factor": "factor",
        "suffix_decoding_min_token_prob": "least",
    }
)


class _Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`speculative_config` as the user writes it. quire/config/speculation_keys.py lists keys of single methods,
    without effect, or with one permitted value."""

    num_speculative_tokens: int | None = None
    method: str | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    adaptive: bool = True
    rejection_sample_method: str = "standard"
    oracle: float | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    revision: str | None = None
    code_revision: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    enforce_eager: bool | None = None
    draft_sample_method: str = "greedy"
    use_local_argmax_reduction: bool = False
    disable_padded_drafter_batch: bool = False
    use_heterogeneous_vocab: bool = False
    parallel_drafting: bool = False
    draft_load_config: dict[str, Any] | None = None
    tensor_parallel_size: int | None = None
    index_share_for_mtp_iteration: bool | None = None
    disable_eagle_block_drop: bool = False
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None

    @property
    def suffix_keys(self) -> dict[str, int | float | None]:
        return {name: getattr(self, name) for name in _SUFFIX_KEYS}
