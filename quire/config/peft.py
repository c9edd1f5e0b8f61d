from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.hf_json import Fields, read_json, shown
from quire.errors import ModelLoadError
from quire.utils.model_files import file_bytes

CONFIG_FILE = "adapter_config.json"
MOST_RANK = 2**14
PATTERN_CHARACTERS = 1024
MOST_PATTERNS = 4096
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes change the base's own product",
    "use_qalora": "QALoRA pools the inputs of quantised layers",
    "use_bdlora": "block-diagonal matrices are not read",
    "lora_bias": "matrices with biases are not read",
    "trainable_token_indices": "it brings rows of the embedding",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "it counts from certain tokens on (aLoRA)",
    "arrow_config": "it mixes adapters",
    "monteclora_config": "it draws its weights",
    "kasa_config": "it changes the base's own matrices",
    "velora_config": "it is not read",
    "megatron_config": "its layers are Megatron's",
}
"""Keys that change what an adapter computes -> reason for the refusal, unless they are off."""
SAVED = ("classifier", "score", "pooler")
"""Modules that may be whole; PEFT names the first two for each classifier."""
BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` for adapters whose base differs from the model's checkpoint."""


@dataclass(frozen=True)
class PeftConfig:
    """Settings of a PEFT adapter. rank, alpha: for modules that no pattern matches. rank_pattern, alpha_pattern:
    regular expressions, in order, for the ends of module names. rank_stabilised: scales are alpha / sqrt(rank).
    target_modules: module names; None: an expression, or all linear layers. target_parameters: ends of
    parameters' names. saved: modules of SAVED."""

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool
    target_modules: tuple[str, ...] | None
    base_model: str | None
    target_parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def targets_parameter(self, name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor of a module's A times B (alpha / rank), before a request's scale."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(directory: Path) -> PeftConfig:
    """Read adapter_config.json. Raises ModelLoadError with file and key for unsupported settings."""
    path = directory / CONFIG_FILE
    if file_bytes(path) is None:
        raise ModelLoadError(f"{directory} holds no adapter: there is no {CONFIG_FILE} in it")
    values = read_json(path)
    fields = Fields(values, str(path))
    kind = fields.text("peft_type", "LORA")
    if kind != "LORA":
        raise fields.error(f"peft_type {shown(kind)} is not supported: LORA is")
    for key, why in REFUSED.items():
        if values.get(key):
            raise fields.error(f"{key} = {shown(values[key])} is not supported: {why}")
    if (bias := fields.text("bias", "none")) != "none":
        raise fields.error(f"bias {shown(bias)} is not supported: biases are the base's")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING):
        raise fields.error(
            f"init_lora_weights {shown(init)} is not supported: such an adapter is of another base than the "
            "checkpoint; PEFT's save_pretrained converts it with path_initial_model_for_weight_conversion"
        )
    for key in ("use_rslora", "fan_in_fan_out", "inference_mode"):
        fields.boolean(key, False)
    return PeftConfig(
        path,
        fields.integer("r", maximum=MOST_RANK),
        fields.number("lora_alpha"),
        _patterns(fields, "rank_pattern", whole=True),
        _patterns(fields, "alpha_pattern", whole=False),
        fields.boolean("use_rslora", False),
        _target_modules(fields),
        base if isinstance(base := values.get("base_model_name_or_path"), str) else None,
        _names(fields, "target_parameters"),
        _saved(fields),
    )


def _patterns(fields: Fields, key: str, *, whole: bool) -> dict[str, Any]:
    given = fields.values.get(key) or {}
    if not isinstance(given, dict) or len(given) > MOST_PATTERNS:
        raise fields.error(f"{key} must map at most {MOST_PATTERNS} expressions to numbers")
    found: dict[str, Any] = {}
    for pattern, value in given.items():
        own = Fields({pattern: value}, f"{fields.where}: {key}")
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError):
            raise fields.error(f"{key}: {shown(pattern)} is no regular expression") from None
        if len(pattern) > PATTERN_CHARACTERS or re.search(r"[*+}?]\)*[*+{]", pattern):
            raise fields.error(f"{key}: {shown(pattern)} is too long, or repeats a repetition")
        found[pattern] = own.integer(pattern, maximum=MOST_RANK) if whole else own.number(pattern)
    return found


def _saved(fields: Fields) -> tuple[str, ...]:
    given = _names(fields, "modules_to_save")
    for name in given:
        if name not in SAVED:
            raise fields.error(
                f"modules_to_save = {shown(list(given))} is not supported: of {shown(name)} name its matrix in "
                f"target_modules instead; only the heads {' and '.join(SAVED)} of classifiers may be saved whole"
            )
    return given


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    given = fields.values.get(key) or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise fields.error(f"{key} must be a list of names or null, not {shown(given)}")
    return tuple(given)


def _target_modules(fields: Fields) -> tuple[str, ...] | None:
    given = fields.values.get("target_modules")
    if given is None or isinstance(given, str):
        return None
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise fields.error(f"target_modules must be a list of names, an expression or null, not {shown(given)}")
    return tuple(given)
