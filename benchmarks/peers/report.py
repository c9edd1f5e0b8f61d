"""Tables in Markdown of what `compare.py --json` wrote: python -m benchmarks.peers.report [--rows] FILE ...

One section for each processor and model, in the order of the files. Ratios are Quire over the peer, the median of the
pairs of one round; what is below 1 is bold. --rows: one line of ratios for each model and peer alone, such as the table
of the README has, in the columns of the first result's workloads.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
MIB, GIB = 1 << 20, 1 << 30


def ratios(samples: Mapping[str, Sequence[float]], peer: str) -> list[float]:
    """Quire's speed over the peer's, round by round."""
    return [ours / theirs for ours, theirs in zip(samples["quire"], samples[peer], strict=True)]


def machine_line(result: Result) -> str:
    """The processor, its limits, and when it was."""
    limits = ", ".join(f"{name} {value:,.0f}" for name, value in result["limits"].items())
    sets = " ".join(result["instruction_sets"])
    return f"{result['cpu']} ({result['cpu_model']}; {sets}), {result['threads']} threads; {limits}; {result['date']}"


def types_text(result: Result) -> str:
    """What a GGUF file holds; nothing for other models."""
    types = sorted(result["types"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {size / MIB:,.1f} MiB" for name, size in types)
    return f" ({shown})" if shown else ""


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as by default"


def cell(samples: Mapping[str, Sequence[float]], peer: str) -> str:
    """RATIO (Quire's speed / the peer's); the ratio is bold where Quire is slower."""
    if not samples.get(peer):
        return "–"
    ratio = statistics.median(ratios(samples, peer))
    shown = f"{ratio:.2f}"
    ours, theirs = statistics.median(samples["quire"]), statistics.median(samples[peer])
    return f"{f'**{shown}**' if ratio < 1 else shown} ({speed(ours)} / {speed(theirs)})"


def speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def peer_rows(result: Result) -> list[str]:
    workloads = list(result["units"])
    rows = []
    for name, facts in result["engines"].items():
        if name == "quire":
            continue
        if "error" in facts:
            reason = facts["error"].splitlines()[-1][:160].replace("|", "/")
            rows.append(f"| {name} | {result['bits']} | " + " | ".join("–" for _ in workloads) + f" | {reason} |")
            continue
        samples = result["samples"]
        cells = [cell(samples.get(workload, {}), name) for workload in workloads]
        by_settings: dict[str, list[str]] = {}
        for workload, settings in facts["settings"].items():
            by_settings.setdefault(settings_text(settings), []).append(workload)
        chosen = "; ".join(
            text if len(by_settings) == 1 else f"{', '.join(names)}: {text}" for text, names in by_settings.items()
        )
        rows.append(f"| {name} {facts['version']} | {result['bits']} | " + " | ".join(cells) + f" | {chosen} |")
    return rows


def memory_rows(result: Result) -> list[str]:
    rows = []
    for name, facts in result["engines"].items():
        if "error" not in facts:
            sizes = [f"{facts[key] / GIB:.2f}" for key in ("loading_bytes", "peak_bytes")]
            rows.append(f"| {name} {facts['version']} | {result['bits']} | {' | '.join(sizes)} | "
                        f"{facts['ready_seconds']:.1f} |")  # fmt: skip
    return rows


def section(results: Sequence[Result]) -> str:
    """Of results with the same processor and model."""
    lines = [f"**{results[0]['model']}**{types_text(results[0])} on {machine_line(results[0])}.", ""]
    by_workloads: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        by_workloads.setdefault(tuple(result["units"]), []).append(result)
    for workloads, some in by_workloads.items():
        lines.append(f"| peer | bits | {' | '.join(f'`{name}`' for name in workloads)} | the peer's fastest setting |")
        lines.append("|---" * (len(workloads) + 3) + "|")
        lines += [row for result in some for row in peer_rows(result)]
        lines.append("")
    lines += ["| engine | bits | memory while loading, GiB | peak, GiB | ready after, s |", "|---|---|---|---|---|"]
    lines += [row for result in results for row in memory_rows(result)]
    quire = "; ".join(
        f"{result['bits']} bits: {settings_text(next(iter(result['engines']['quire']['settings'].values())))}"
        for result in results
    )
    versions = ", ".join(sorted({result["engines"]["quire"]["version"] for result in results}))
    lines += ["", f"Quire {versions}: {quire}. Ratio (Quire / peer, tokens/s), medians of the rounds; a prompt alone"]
    lines[-1] += " counts its input tokens. Bold: Quire is slower."
    return "\n".join(lines)


def ratio_rows(results: Sequence[Result]) -> list[str]:
    """A table with nothing but ratios: a line for each model and peer."""
    workloads = list(results[0]["units"])
    lines = [f"| model | peer | {' | '.join(f'`{name}`' for name in workloads)} |", "|---" * (len(workloads) + 2) + "|"]
    for result in results:
        for name, facts in result["engines"].items():
            if name == "quire" or "error" in facts:
                continue
            samples = [result["samples"].get(workload, {}) for workload in workloads]
            found = [f"{statistics.median(ratios(each, name)):.2f}" if each.get(name) else "–" for each in samples]
            title = result["model"] if result["types"] else f"{result['model']}, {result['bits']} bits"
            lines.append(f"| {title} | {name} {facts['version']} | {' | '.join(found)} |")
    return lines


def as_markdown(results: Sequence[Result]) -> str:
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        key = (result["cpu"], result["cpu_model"], str(result["threads"]), result["model"])
        groups.setdefault(key, []).append(result)
    return "\n\n".join(section(group) for group in groups.values())


def as_text(result: Result) -> str:
    """The result of one run for a terminal: settings, medians, ratios with the least and the greatest, memory."""
    weights = types_text(result) or f", {result['bits']} bits"
    lines = [f"{result['model']}{weights}, {machine_line(result)}"]
    for name, facts in result["engines"].items():
        if "error" in facts:
            lines.append(f"{name}: left out: {facts['error']}")
            continue
        sizes = f"{facts['loading_bytes'] / GIB:.2f} GiB while loading, {facts['peak_bytes'] / GIB:.2f} GiB at most"
        lines.append(f"{name} {facts['version']}: ready after {facts['ready_seconds']:.1f} s, {sizes}")
        for workload, settings in facts["settings"].items():
            lines.append(f"  {workload}: {settings_text(settings)}")
    width = max(len(name) for name in ("workload", *result["units"]))
    lines.append(f"{'workload':<{width}}  {'':<12} {'peer':<20} {'Quire':>9} {'peer':>9} {'ratio':>6}  least-greatest")
    for workload, unit in result["units"].items():
        samples = result["samples"].get(workload, {})
        if not samples:
            lines.append(f"{workload:<{width}}  was not reached in the time that was given")
        for name in samples:
            if name == "quire":
                continue
            found = ratios(samples, name)
            ours, theirs = statistics.median(samples["quire"]), statistics.median(samples[name])
            lines.append(
                f"{workload:<{width}}  {unit:<12} {name:<20} {ours:>9.1f} {theirs:>9.1f} "
                f"{statistics.median(found):>6.2f}  {min(found):.2f}-{max(found):.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    has_rows = sys.argv[1:2] == ["--rows"]
    names = sys.argv[2:] if has_rows else sys.argv[1:]
    if not names or names[0].startswith("-"):
        sys.exit(__doc__)
    results = [result for name in names for result in json.loads(Path(name).read_text())]
    print("\n".join(ratio_rows(results)) if has_rows else as_markdown(results))


if __name__ == "__main__":
    main()
