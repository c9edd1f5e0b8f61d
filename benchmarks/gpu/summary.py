"""What came out, on one page: what failed first, then the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.records import Record

FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
COUNTS = re.compile(r"^.*\b(?:passed|failed|error)\b.*\bin [\d.]+s.*$", re.MULTILINE)

WRONG_DIFFERENCE = 1e-2
"""Of results in bfloat16 from float32, relative."""


def summarize(found: Sequence[Record], outcomes: Sequence[Outcome], logs: Path, *, is_rehearsal: bool = False) -> str:
    """Short enough for the end of a log. logs: the folder of what the parts printed."""
    lines = ["", "== Parts"]
    for outcome in outcomes:
        log = logs / f"{outcome.name}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        counts = COUNTS.findall(text)[-1:]
        lines.append(f"{outcome.name:14}{outcome.status:12}{outcome.seconds:6.0f} s  {''.join(counts).strip('= ')}")
        lines += [f"  FAILED {name}" for name in FAILED_TEST.findall(text)[:6]]
    lines += [f"--- {each.name} ---\n{each.tail[-600:]}" for each in outcomes if each.status == "failed"][:2]
    errors = [record for record in found if "error" in record]
    lines += [f"ERROR {_title(record)}: {record['error'][:120]}" for record in errors[:6]]
    if is_rehearsal:
        lines.append(f"A rehearsal: {len(found)} records, {len(errors)} of them errors. Times mean nothing.")
    figures = _engine, _comparison, _kernels, _breakdown, _attention, _experiments, _products, _drafts
    for section in (_machine, *figures, _throttled):
        lines += section([record for record in found if "error" not in record])
    return "\n".join(lines)


def _title(record: Record) -> str:
    return ", ".join(str(record[key]) for key in ("part", "what", "kernel", "case", "variant") if key in record)


def _of(found: Iterable[Record], *whats: str) -> list[Record]:
    return [record for record in found if record["what"] in whats]


def _section(title: str, records: Sequence[Record], line: Callable[[Record], str]) -> list[str]:
    return ["", f"== {title}", *map(line, records)] if records else []


def _machine(found: Sequence[Record]) -> list[str]:
    def line(record: Record) -> str:
        if record["what"] == "cache":
            return "cache: " + ", ".join(
                f"{record[kind][0]} of {record[kind][1]} {kind}" for kind in ("kernels", "launchers")
            )
        missing = [f"MISSING {need['name']}: {need['missing']}" for need in record["needs"] if need["missing"]]
        cache = f"libtriton {record['libtriton']}, {record['cached_kernels']} kernels in the cache"
        return "; ".join((record["card"], f"peers {', '.join(record['peers']) or 'none'}", cache, *missing))

    return _section("Machine", _of(found, "machine", "cache"), line)


def _engine(found: Sequence[Record]) -> list[str]:
    def line(record: Record) -> str:
        what, start = record["what"], f"{record.get('format', ''):5}"
        if what == "limits":
            return f"{start}copy {record['bandwidth'] / 1e12:.2f} TB/s, product {record['peak'] / 1e12:.0f} TFLOP/s"
        if what == "ready":
            graphs = f"{record['num_graphs']} graphs in {record['graph_seconds']:.1f} s"
            return f"{start}ready after {record['seconds']:.1f} s, {graphs}, {record['num_slots']} slots"
        if "family" in record:
            start = f"{record['family']} ({record['layers']}): "
        if what == "prompt":
            share = f"{record['share']:.1%} of the limit"
            return f"{start}prompt of {record['num_tokens']}: {record['seconds'] * 1e3:.0f} ms, {share}"
        times = f"{record['step_seconds'] * 1e3:.2f} ms a step, {record['share']:.1%} of the limit"
        return f"{start}{what} {record['work']}: {times}, host {record['host'] * 1e3:.2f} ms"

    mine = [record for record in found if record["part"] in ("engine", "fp8", "families")]
    return _section("Engine", _of(mine, "limits", "ready", "single", "step", "long", "prompt"), line)


def _comparison(found: Sequence[Record]) -> list[str]:
    """Output tokens/s of both engines, and Quire's share of vLLM's time. Of one that ran twice, the later counts."""
    speeds: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in _of(found, "workload"):
        name = record["part"] if record["part"] == "quire-again" else record["engine"]
        case = (record["model"], record["format"], record["workload"])
        speeds.setdefault(case, {})[name] = record["output_tokens_per_second"]
    lines, ratios = [], []
    for (model, weights, workload), of in speeds.items():
        both = [of[engine] for engine in ("quire", "vllm") if engine in of]
        if len(both) == 2:
            ratios.append(both[0] / both[1])
        ratio = f"  x {both[0] / both[1]:.3f}" if len(both) == 2 else ""
        lines.append(
            f"{model:14}{weights:5}{workload:16}"
            + "".join(f"{engine} {speed:.1f}  " for engine, speed in of.items())
            + ratio
        )
    if ratios:
        lines.append(f"geometric mean of {len(ratios)}: {geometric_mean(ratios):.3f} (above 1: Quire is faster)")
    return ["", "== Side by side (output tokens/s)", *lines] if lines else []


def _kernels(found: Sequence[Record]) -> list[str]:
    """A line for each case: ours with its share of the limit, then the others' speed against it."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in _of(found, "kernel"):
        cases.setdefault((record["kernel"], record["case"]), []).append(record)
    lines = []
    for (kernel, case), (first, *others) in cases.items():
        beside = "".join(f"; {each['variant']} {first['seconds'] / each['seconds']:.2f} x as fast" for each in others)
        lines.append(f"{kernel:22}{case:26}{first['share']:7.1%}{first['seconds'] * 1e6:10.1f} us{beside}")
    return ["", "== Kernels (share of the limit)", *lines] if lines else []


def _breakdown(found: Sequence[Record]) -> list[str]:
    def line(record: Record) -> str:
        top = ", ".join(f"{row['name'][:28]} {row['microseconds_per_step']:.0f} us" for row in record["kernels"][:6])
        between = f"busy {record['busy']:.1%}, idle between steps {record['idle_between_steps']:.1%}"
        name = f"{record['family']}, " if "family" in record else ""
        return f"{name}{record['num_seqs']}: {record['launches_per_step']:.0f} launches, {between}; {top}"

    return _section("A decode step (sequences of 1,024 tokens)", _of(found, "breakdown"), line)


def _attention(found: Sequence[Record]) -> list[str]:
    """Variants of each case, the first as the engine has it; what is not right is marked."""
    cases: dict[str, list[Record]] = {}
    for record in _of(found, "attention variant"):
        cases.setdefault(record["case"], []).append(record)

    def variant(record: Record) -> str:
        is_wrong = record["nan"] or not record["difference"] < WRONG_DIFFERENCE
        mark = f" WRONG ({record['difference']:.1e}, {record['nan']} NaN)" if is_wrong else ""
        return f"{record['variant']} {record['seconds'] * 1e6:.1f} us{mark}"

    lines = [f"{case}: {'; '.join(map(variant, variants))}" for case, variants in cases.items()]
    return ["", "== Variants of attention", *lines] if lines else []


def _experiments(found: Sequence[Record]) -> list[str]:
    tried = _of(found, "bits")
    lines = []
    for variant in dict.fromkeys(record["variant"] for record in tried):
        of = [record for record in tried if record["variant"] == variant]
        word = "same bits" if all(record["equal"] for record in of) else "OTHER BITS"
        times = ", ".join(f"{record['m']}: {record['seconds'] * 1e6:.0f} us" for record in of)
        lines.append(f"tiles {variant}: {word}; {times}")
    launches = [record for record in _of(found, "launch") if "seconds" in record]
    lines += [f"a small launch, {record['variant']}: {record['seconds'] * 1e6:.2f} us" for record in launches]
    counted = _of(found, "counters")
    share = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    lines += [f"counters {record['kernel'][:40]}: {record.get(share, -1):.0f} % of DRAM" for record in counted]
    return ["", "== Experiments, counters", *lines] if lines else []


def _products(found: Sequence[Record]) -> list[str]:
    """The fastest ways to multiply with each matrix, and the one that was measured first."""
    measured = [record for record in _of(found, "product") if "seconds" in record]
    lines = []
    for case in dict.fromkeys((record["format"], record["matrix"], record["m"]) for record in measured):
        ways = [record for record in measured if (record["format"], record["matrix"], record["m"]) == case]
        first = ways[0]
        ways.sort(key=_seconds)
        shown = ways[:4] + [way for way in ways[4:] if way is first]
        lines.append("{} {}, {} rows".format(*case))
        for way in shown:
            wrong = "" if way["nan"] == 0 and way["error of all"] < 0.02 else f" WRONG by {way['error of all']:.3g}"
            share = f"{way['share']:7.1%} " if "share" in way else ""
            lines.append(f"  {way['seconds'] * 1e6:9.1f} us {share}{way['variant']}{wrong}")
    for record in _of(found, "bits of few rows"):
        lines.append(f"bits of few rows, {record['format']}: {record.get('differing', record.get('error'))} differing")
    return ["", "== Ways to multiply, and their share of the limit", *lines] if lines else []


def _drafts(found: Sequence[Record]) -> list[str]:
    """Each case with drafts against the same without; other tokens are marked."""

    def line(record: Record) -> str:
        method = record.get("method", "plain")
        if record["what"] == "ready":
            return f"{method}, {record['drafts']} drafts: ready after {record['seconds']:.1f} s"
        mark = f" OTHER TOKENS in {record['differing']} of {record['num_seqs']}" if record["differing"] else ""
        steps = f"{record['step_seconds'] * 1e3:.2f} ms a step ({record['plain_step_seconds'] * 1e3:.2f} without)"
        speed = f"{record['plain_token_seconds'] / record['token_seconds']:.2f} x the tokens/s"
        accepted = f"{record['num_accepted']} of {record['num_drafts']} accepted"
        return f"{method}, {record['case']}: {accepted}, {steps}, {speed}{mark}"

    shown = [record for record in found if record["part"] == "drafts" and record["what"] in ("ready", "drafts")]
    return _section("Drafts", shown, line)


def _seconds(record: Record) -> float:
    return float(record["seconds"])


def _throttled(found: Sequence[Record]) -> list[str]:
    """Parts at whose end the card gave a reason for not running at its clocks; 1 is being idle."""
    codes = {record["part"]: record["after"].get("reasons", "") for record in _of(found, "clocks")}
    parts = [part for part, code in codes.items() if code.startswith("0x") and int(code, 16) > 1]
    return ["", f"== Throttled after: {', '.join(parts)}"] if parts else []
