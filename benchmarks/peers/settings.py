"""What each peer may be set to at a number of bits, and the search for the fastest of it on the machine at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
Axes = dict[str, tuple[Any, ...]]
"""Values of each setting, the likely ones first."""
BITS = (16, 8, 4)
QUIRE: dict[int, Settings] = {16: {"dtype": "bfloat16"}, 8: {"quantization": "w8a8"}, 4: {"quantization": "w4a8"}}
"""What is compared with the peers at each number of bits; everything else is as Quire chooses it."""
FILE_FORMATS: dict[int, tuple[str, ...]] = {8: ("q8_0",), 4: ("q4_k_m", "q4_0")}
"""The GGUF files in which Quire and llama.cpp are compared with each other, those that most people have first."""


def axes_of(peer: str, bits: int, threads: int, instruction_sets: Sequence[str]) -> Axes:
    """What the search tries. Empty where the peer does not make weights of this width from an ordinary checkpoint.
    instruction_sets: names as in /proc/cpuinfo.

    16 bits: the weights lie in the checkpoint as bfloat16; a peer may compute with them in any precision.
    """
    formats: dict[str, dict[int, Axes]] = {
        "vllm": {16: {"dtype": ("bfloat16", "float32")}},
        "openvino": {16: {"format": ("fp16",)}, 8: {"format": ("int8",)}, 4: {"format": ("int4",)}},
        "llama.cpp": {
            16: {"format": ("f16", "bf16")},
            **{bits: {"format": kinds} for bits, kinds in FILE_FORMATS.items()},
        },
        "ctranslate2": {16: {"compute_type": ("float32",)}, 8: {"compute_type": ("int8_float32",)}},
        "mistral.rs": {
            16: {"dtype": ("F32", "BF16", "F16")},
            8: {"in_situ_quant": ("Q8_0",), "dtype": ("F32",)},
            4: {"in_situ_quant": ("Q4_0", "Q4K"), "dtype": ("F32",)},
        },
        "transformers": {16: {"dtype": ("float32", "bfloat16")}},
        "quire": {bits: {name: (value,) for name, value in settings.items()} for bits, settings in QUIRE.items()},
    }
    axes = formats[peer].get(bits, {})
    if not axes:
        return {}
    axes = dict(axes)
    if peer == "openvino":
        hints = ["f32"]
        if {"avx512_bf16", "amx_bf16"} & set(instruction_sets):
            hints.insert(0, "bf16")
        if "avx512_fp16" in instruction_sets or "amx_fp16" in instruction_sets:
            hints.append("f16")
        axes |= {"INFERENCE_PRECISION_HINT": tuple(hints), "KV_CACHE_PRECISION": ("u8", "f16", "f32")}
    if peer == "llama.cpp":
        axes["flash_attn_type"] = (1, 0)
        if threads >= 4:  # two threads of each core may be slower than one
            axes["n_threads"] = (threads, threads // 2)
    return axes


def settings_of_file(peer: str, threads: int, instruction_sets: Sequence[str]) -> Axes:
    """What the search tries where a GGUF file says what the weights are: all but their format."""
    axes = axes_of(peer, 4, threads, instruction_sets)
    return {name: values for name, values in axes.items() if name not in ("format", "quantization")}


@dataclass(frozen=True)
class Trial:
    """One setting of a peer: tokens per second at each workload, or why it does not run."""

    settings: Settings
    speeds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def search(
    axes: Axes, measure: Callable[[Settings], Trial], may_go_on: Callable[[], bool] = lambda: True
) -> list[Trial]:
    """Try the first value of every setting, then the others of one after the other beside the best ones so far.

    measure: runs a peer. may_go_on: False ends the search where it is.
    """
    best = measure({name: values[0] for name, values in axes.items()})
    trials = [best]
    for name, values in axes.items():
        for value in values[1:]:
            if not may_go_on():
                return trials
            trials.append(measure({**best.settings, name: value}))
        best = max((trial for trial in trials), key=_overall)
    return trials


def fastest(trials: Sequence[Trial], workload: str) -> Trial:
    """The best one at a workload. Raises ValueError when none ran it."""
    ran = [trial for trial in trials if workload in trial.speeds]
    if not ran:
        reasons = "; ".join(f"{trial.settings}: {trial.error or 'was not reached'}" for trial in trials)
        raise ValueError(f"no setting ran {workload}: {reasons}")
    return max(ran, key=lambda trial: trial.speeds[workload])


def _overall(trial: Trial) -> tuple[int, float]:
    """How many workloads ran, and the mean of the logarithms of their speeds."""
    return len(trial.speeds), sum(map(math.log, trial.speeds.values())) / max(1, len(trial.speeds))
