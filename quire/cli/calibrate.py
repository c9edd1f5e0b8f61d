"""`quire simulate calibrate`: fits the cost model's factors to a real run's step log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import Parser
from quire.cli.report import check_writable
from quire.config.model_shape import ModelShape
from quire.engine.step_log import StepLogHeader, StepRecord, read_step_log
from quire.errors import UserError
from quire.simulator.cost import Precision
from quire.simulator.hardware import Hardware, find, to_json
from quire.simulator.shape import find_shape

if TYPE_CHECKING:
    from quire.simulator.calibration import Errors, Fit
    from quire.simulator.jitter import Jitter

DEFAULT_BASE = "cpu-2-core-avx512"


def build_parser() -> Parser:
    parser = Parser(
        prog="quire simulate calibrate",
        usage="quire simulate calibrate LOG [LOG ...] [--model M] [--gpu NAME] [--profile OUT.json]",
        description="Fit the factors of the cost model to logged steps (--step-log of whatever runs an engine).",
    )
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="step logs of one model on one device")
    parser.add_argument("--model", metavar="M", help="the model that ran (default: what the log names)")
    parser.add_argument(
        "--gpu", metavar="NAME", default=DEFAULT_BASE, help=f"the profile to begin with ({DEFAULT_BASE}), or its file"
    )
    parser.add_argument("--name", metavar="NAME", help="of the new profile (default: the file's, or the old one)")
    parser.add_argument("--profile", metavar="OUT.json", type=Path, help="write the profile there, for --gpu OUT.json")
    parser.add_argument("--json", action="store_true", help="print the fit as JSON instead of text")
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    if namespace.profile is not None and namespace.profile.suffix != ".json":
        raise UserError(f"--profile must name a file *.json, not {str(namespace.profile)!r}", param="profile")
    check_writable(namespace.profile, param="profile")
    header, records = _read(namespace.logs)
    shape = find_shape(namespace.model or header.model)
    _check_model(shape, header)
    base = find(namespace.gpu)
    fit = fit_profile(shape, base, header, records)
    name = namespace.name or (base.name if namespace.profile is None else namespace.profile.stem)
    source = f"fitted to {fit.num_logged:,} steps of {header.model} ({header.backend})"
    hardware = replace(fit.hardware, name=name.lower(), source=source)
    if namespace.profile is not None:
        namespace.profile.write_text(json.dumps(to_json(hardware), indent=2) + "\n", encoding="utf-8")
    if namespace.json:
        print(json.dumps(as_dict(fit, hardware), indent=2))
    else:
        print(as_text(fit, base, hardware, header))
        if namespace.profile is not None:
            print(f"\nwrote {namespace.profile}: quire simulate --gpu {namespace.profile} ...")
    return 0


def fit_profile(shape: ModelShape, base: Hardware, header: StepLogHeader, records: Sequence[StepRecord]) -> Fit:
    from quire.simulator.calibration import calibrate, samples_of
    from quire.simulator.cost import windows_of

    windows = windows_of(shape)
    precision = Precision.of(shape, header.weights, header.kv_cache_dtype)
    return calibrate(shape, base, precision, samples_of(records, windows), block_tokens=header.block_size)


def _read(paths: Sequence[Path]) -> tuple[StepLogHeader, list[StepRecord]]:
    """Header and steps of several logs joined. Raises UserError unless they have the same model and device."""
    found = [read_step_log(path) for path in paths]
    header = found[0][0]
    for path, (other, _) in zip(paths, found, strict=True):
        for name in ("model", "weights", "kv_cache_dtype", "backend", "block_size"):
            if getattr(other, name) != getattr(header, name):
                raise UserError(
                    f"{str(path)!r} is a log of another run: {name} is {getattr(other, name)!r}, not "
                    f"{getattr(header, name)!r}",
                    param="log",
                )
    return header, [record for _, records in found for record in records]


def _check_model(shape: ModelShape, header: StepLogHeader) -> None:
    expected = (header.num_layers, header.hidden_size, header.vocab_size)
    if (shape.num_layers, shape.hidden, shape.vocab) != expected:
        raise UserError(
            f"the log is of {header.model!r} with {expected[0]} layers of {expected[1]} and a vocabulary of "
            f"{expected[2]}, {shape.name!r} has {shape.num_layers} of {shape.hidden} and {shape.vocab}",
            param="model",
        )


NAMES: Mapping[str, tuple[str, float, str]] = {
    "compute": ("of the peak, products of many rows", 100, "%"),
    "half_rows": ("rows at which products reach half of that", 1, ""),
    "bandwidth": ("of the bandwidth, products of few rows", 100, "%"),
    "attention_compute": ("of the peak, attention", 100, "%"),
    "attention_bandwidth": ("of the bandwidth, attention", 100, "%"),
    "launch_overhead": ("for each kernel", 1e6, "µs"),
    "token_overhead": ("for each token", 1e6, "µs"),
    "sequence_overhead": ("for each sequence", 1e6, "µs"),
    "new_sequence_overhead": ("for each sequence that begins", 1e6, "µs"),
    "host_overhead": ("between steps", 1e6, "µs"),
    "host_overhead_per_sequence": ("between steps, for each sequence", 1e6, "µs"),
    "host_overhead_per_new_sequence": ("between steps, for each that begins", 1e6, "µs"),
    "wake_overhead": ("for a step after idle time", 1e6, "µs"),
}


def _value(hardware: Hardware, name: str) -> float:
    return float(getattr(hardware.factors if hasattr(hardware.factors, name) else hardware, name))


def as_text(fit: Fit, base: Hardware, hardware: Hardware, header: StepLogHeader) -> str:
    lines = [
        f"{header.model} ({header.backend}), {fit.num_logged:,} steps, from the profile {base.name}",
        "",
        f"{'steps':<24}{'count':>8}{'median error':>14}{'P95':>8}{'sum':>9}",
        _error_line("all", fit.all_steps),
    ]
    for name, errors in (("one token each", fit.decode_steps), ("with prompts", fit.other_steps)):
        if errors is not None:
            lines.append(_error_line(name, errors))
    lines += ["", f"{'':<44}{'fitted':>12}{'before':>12}"]
    for name, (title, scale, unit) in NAMES.items():
        before, after = _value(base, name) * scale, _value(hardware, name) * scale
        is_told = name in fit.told or name not in _FITTED
        note = "" if is_told else "   (the log does not tell)"
        lines.append(f"{title:<44}{f'{after:.3g} {unit}':>12}{f'{before:.3g} {unit}':>12}{note}")
    lines += _jitter_lines(hardware.jitter)
    return "\n".join(lines)


def _jitter_lines(jitter: Jitter) -> list[str]:
    if not jitter:
        return []
    lines = ["", f"{'jitter: time over the expected':<32}" + "".join(f"{f'P{100 * level:g}':>8}" for level in SHOWN)]
    for name, table in (("one token each", jitter.single), ("with prompts", jitter.chunks)):
        if table:
            ratios = [next(ratio for end, ratio in table if level <= end) for level in SHOWN]
            lines.append(f"{name:<32}" + "".join(f"{ratio:>8.2f}" for ratio in ratios))
    parts = [f"{share:.0%} over {seconds:g} s" for seconds, share in jitter.lasting]
    lines.append(f"{'of which lasts':<32}  {', '.join(parts) or 'nothing from step to step'}")
    if jitter.stalls:
        rate = sum(count for _, count in jitter.stalls)
        mean = sum(seconds * count for seconds, count in jitter.stalls) / rate
        lines.append(f"{'stalls besides':<32}  {rate:.3g} a second of work, of {1e3 * mean:.3g} ms in the mean")
    return lines


SHOWN = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_FITTED = tuple(name for name in NAMES if not name.startswith(("host", "wake")))


def _error_line(name: str, errors: Errors) -> str:
    return f"{name:<24}{errors.count:>8,}{errors.median:>13.1%} {errors.p95:>7.1%}{errors.total:>+9.1%}"


def as_dict(fit: Fit, hardware: Hardware) -> dict[str, Any]:
    """Report as JSON: relative errors, and the profile."""
    errors = {"all": fit.all_steps, "one_token_each": fit.decode_steps, "with_prompts": fit.other_steps}
    return {
        "num_steps": fit.num_logged,
        "errors": {name: None if found is None else vars(found) for name, found in errors.items()},
        "determined": sorted(fit.told),
        "profile": to_json(hardware),
    }
