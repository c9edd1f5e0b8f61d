"""What is asked of a card, and what the records say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.records import Record

Value = float | None


@dataclass(frozen=True, slots=True)
class Target:
    """text: what is asked. value: from the records; None where they do not say. goal: to reach, from below, or, with
    at_most, from above. percent: how it is shown. look_at: what to do about a miss."""

    text: str
    value: Callable[[Sequence[Record]], Value]
    goal: float
    look_at: str
    at_most: bool = False
    percent: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """value None: not measured."""

    target: Target
    value: Value

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.target.goal if self.target.at_most else self.value >= self.target.goal

    @property
    def shortfall(self) -> float:
        """Roughly the share of time that a miss costs: of a goal, what is missing; of a cost, what is too much. 0 where
        the goal is reached or nothing was measured."""
        if self.value is None or self.reached:
            return 0.0
        difference = abs(self.value - self.target.goal)
        return difference if self.target.at_most else difference / self.target.goal

    @property
    def word(self) -> str:
        return {None: "not measured", True: "reached", False: "MISSED"}[self.reached]

    @property
    def shown(self) -> str:
        if self.value is None:
            return "-"
        return f"{self.value:.1%}" if self.target.percent else f"{self.value:.2f}"

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target.text, "value": self.value, "verdict": self.word}


def kernels(found: Sequence[Record], kernel: str, variant: str = "triton") -> list[Record]:
    """What was measured of a kernel in one way."""
    return [
        record
        for record in found
        if record.get("what") == "kernel" and (record["kernel"], record["variant"]) == (kernel, variant)
    ]


def least_share(
    *names: str, variant: str = "triton", only: Sequence[str] | None = None, but: Sequence[str] = ()
) -> Callable[[Sequence[Record]], Value]:
    """The worst share of its limit that a case of these kernels reached in one way. only: cases that count (None: all).
    but: that do not."""

    def value(found: Sequence[Record]) -> Value:
        cases = [record for name in names for record in kernels(found, name, variant) if "share" in record]
        counted = [r for r in cases if (only is None or r["case"] in only) and r["case"] not in but]
        return min((record["share"] for record in counted), default=None)

    return value


def seconds_by_case(found: Sequence[Record], kernel: str, variant: str = "triton") -> dict[str, float]:
    return {record["case"]: record["seconds"] for record in kernels(found, kernel, variant) if "seconds" in record}


def longer(
    kernel: str, variant: str, than: str, only: Sequence[str] | None = None
) -> Callable[[Sequence[Record]], Value]:
    """Median over the cases of a kernel: by how much one variant takes longer than another. only: as least_share."""

    def value(found: Sequence[Record]) -> Value:
        one, other = seconds_by_case(found, kernel, variant), seconds_by_case(found, kernel, than)
        ratios = [one[case] / other[case] - 1 for case in one if case in other and (only is None or case in only)]
        return median(ratios) if ratios else None

    return value


def engine(what: str, field: str) -> Callable[[Sequence[Record]], Value]:
    """A field of the one record of an engine's task in full mode."""

    def value(found: Sequence[Record]) -> Value:
        values = [
            record[field]
            for record in found
            if record.get("what") == what and record.get("mode", "full") == "full" and field in record
        ]
        return values[-1] if values else None

    return value


def step_seconds(found: Sequence[Record], mode: str) -> dict[int, float]:
    """Number of sequences -> seconds of a decode step."""
    return {
        record["num_seqs"]: record["step_seconds"]
        for record in found
        if record.get("what") == "ladder" and record.get("mode") == mode
    }


def speed_up(fast: str, slow: str) -> Callable[[Sequence[Record]], Value]:
    """Median over the batch sizes: by how much steps are faster in one mode than in the other."""

    def value(found: Sequence[Record]) -> Value:
        one, other = step_seconds(found, fast), step_seconds(found, slow)
        ratios = [other[size] / one[size] - 1 for size in one if size in other]
        return median(ratios) if ratios else None

    return value


def over_transformers(found: Sequence[Record]) -> Value:
    """Tokens a second on the same work."""
    ours, theirs = engine("peer work", "tokens_per_second")(found), engine("transformers", "tokens_per_second")(found)
    return None if ours is None or theirs is None else ours / theirs


ONE_LONG = "1 x 1 of 8192 tokens"
LARGE = ("8192 tokens", "64 blocks")
FILLED = ("64 rows an expert", "256 rows an expert")
"""Cases in which every expert has a whole tile of rows."""
"""Cases in which a launch does not count."""
TARGETS = (
    Target(
        "decode attention >= 80 % of its limit (without one sequence alone)",
        least_share("decode attention", but=(ONE_LONG,)),
        0.8,
        "attention_sweep, then splits planned on the device (counters of _split_kernel)",
    ),
    Target(
        "decode attention of one sequence of 8192 >= 60 %",
        least_share("decode attention", only=(ONE_LONG,)),
        0.6,
        "the launches of write, split and merge (breakdown at 1), resident programs",
    ),
    Target(
        "prompt attention, 8192 tokens >= 60 %",
        least_share("prefill attention", only=("1 x 8192 of 8192 tokens",)),
        0.6,
        "tensor pipe and issue slots of _varlen_kernel (counters), FlashAttention 3 beside it",
    ),
    Target(
        "prompt attention, 8 x 1024 tokens >= 40 %",
        least_share("prefill attention", only=("8 x 1024 of 1024 tokens",)),
        0.4,
        "start and end of programs: a persistent grid, longest first",
    ),
    Target(
        "norms, activations, embedding, copies >= 85 % of bandwidth",
        least_share("RMSNorm", "RMSNorm of a sum", "gated SiLU", "embedding", "block copy", only=LARGE),
        0.85,
        "warps and widths in norm.py, activation.py, block_copy.py",
    ),
    Target(
        "experts in bfloat16 and FP8, from 64 rows an expert >= 60 % of peak",
        least_share("bf16 experts", "fp8 experts", only=FILLED),
        0.6,
        "tiles and stages in experts.py; counters of _experts_kernel (tensor pipe)",
    ),
    Target(
        "latent attention of single tokens >= 70 % of its limit, bfloat16 and FP8",
        least_share("latent attention", "fp8 latent attention"),
        0.7,
        "rows of a tile, keys of a part (latent_attention.py); counters of _latent_kernel",
    ),
    Target(
        "delta rule, decodes >= 60 % of bandwidth",
        least_share("delta rule decode"),
        0.6,
        "columns of a program, and what _rule_kernel spills (ahead_of_time 90 states)",
    ),
    Target(
        "delta rule, prompts >= 5 % of the peak in bfloat16 (three products in TF32 for each could reach 17 %)",
        least_share("delta rule prompt"),
        0.05,
        "spills of _rule_kernel: smaller tiles of a state, or keys by slices",
    ),
    Target(
        "the indexer >= 50 % of its limit",
        least_share("indexer"),
        0.5,
        "_choose_kernel reads the scores 18 times; keys of a part in _scores_kernel",
    ),
    Target(
        "attention over chosen keys >= 50 % of its limit",
        least_share("sparse attention"),
        0.5,
        "the keys of one token are not shared out over programs (_sparse_kernel)",
    ),
    Target(
        "attention of encoders >= 40 % of its limit",
        least_share("encoder attention"),
        0.4,
        "tiles of 64 by 64 and four warps in encoder_attention.py; launches without graphs",
    ),
    Target(
        "means of texts >= 50 % of bandwidth",
        least_share("means of texts"),
        0.5,
        "rows are added one by one in _mean_kernel",
    ),
    Target(
        "FP8 product of one token >= 70 % of bandwidth",
        least_share("fp8 product gate_up", only=("1 tokens",)),
        0.7,
        "narrower tiles, or a fixed number of sums over K (stored_tiles)",
    ),
    Target(
        "FP8 with rounded activations, against widened >= 10 % faster",
        longer("fp8 product gate_up", "rounded activations", "triton"),
        -0.1,
        "the row of round_rows beside the product; promotion of sums",
        at_most=True,
    ),
    Target(
        "w8a8, 8192 tokens, against widened int8 >= 30 % faster",
        longer("int8 product gate_up", "rounded activations", "triton", only=("8192 tokens",)),
        -0.3,
        "64 rows a program of _matmul_kernel leave half of the integer products' rate: larger tiles",
        at_most=True,
    ),
    Target(
        "w4a8, 8192 tokens, against widened int4: not slower",
        longer("int4 product gate_up", "rounded activations", "triton", only=("8192 tokens",)),
        0.0,
        "int32 sums of each group of 32 become float32: sums of offsets as one product, larger groups",
        at_most=True,
    ),
    Target(
        "w8a8 product of one token >= 70 % of bandwidth",
        least_share("int8 product gate_up", variant="rounded activations", only=("1 tokens",)),
        0.7,
        "the launch of round_rows beside the product; narrower tiles",
    ),
    Target(
        "Qwen3-8B, batch 1 >= 85 % of the weights' bandwidth",
        engine("single", "share"),
        0.85,
        "launches and gaps of a step of one (breakdown), skinny products with what surrounds them fused",
    ),
    Target(
        "as many requests as fit, 1K in, 1K out >= 70 % of the roofline",
        engine("batch", "share"),
        0.7,
        "the longest kernels of a step of 256 (breakdown)",
    ),
    Target(
        "no preemption in that batch",
        engine("batch", "num_preemptions"),
        0,
        "the number of blocks the engine said it has",
        at_most=True,
        percent=False,
    ),
    Target(
        "GPU idle between steps < 3 %",
        engine("idle", "idle"),
        0.03,
        "host times of the ladder, launching",
        at_most=True,
    ),
    Target(
        "splits planned for 40,960 cost decodes < 3 %",
        longer("decode attention", "planned for 40,960", "triton"),
        0.03,
        "empty programs of _split_kernel and _merge_kernel: plan on the device",
        at_most=True,
    ),
    Target(
        "paged over contiguous attention < 10 % slower",
        longer("decode attention", "triton", "contiguous"),
        0.1,
        "block sizes 64 and 128 in the same table",
        at_most=True,
    ),
    Target("full graphs over eager >= 6 % faster", speed_up("full", "eager"), 0.06, "launches in graphs"),
    Target("piecewise graphs over eager >= 6 % faster", speed_up("piecewise", "eager"), 0.06, "launches in graphs"),
    Target(
        "full over piecewise graphs <= 7 % faster",
        speed_up("full", "piecewise"),
        0.07,
        "the host's time of a launch (launching in the ladder)",
        at_most=True,
    ),
    Target(
        "over Transformers' continuous batching >= 5 x",
        over_transformers,
        5,
        "the peer's version and attention",
        percent=False,
    ),
)


def verdicts(found: Sequence[Record], targets: Iterable[Target] = TARGETS) -> list[Verdict]:
    """All targets, measured or not."""
    return [Verdict(target, target.value(found)) for target in targets]
