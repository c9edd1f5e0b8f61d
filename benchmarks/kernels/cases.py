"""What is measured: kernels over the shapes of models of four sizes, and the work that each of them has to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.errors import UserError, nearest_name

LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
LAYER_ROWS = (1, 32, 512)
HEAD_ROWS = 128
"""Most rows of the vocabulary projection: logits are computed for the rows that are sampled, one a sequence."""
CONTEXTS = (256, 1024, 4096, 16384)
DECODE_ROWS = (1, 8, 32)
PREFILL_ROWS = (512, 2048)
COPIED_BLOCKS = (1, 32)
BLOCK_SIZE = 16
INT4_GROUP = 64
MX_GROUP = 32
FLOAT_BYTES = 4
DELTA_HEADS = (16, 32, 128, 128)
"""Key heads, value heads, elements of a key and of a value of a delta rule: those of Qwen3-Next, beside every model."""
KERNELS_PER_LAYER = 8
"""Of a dense decoder layer: two norms, four products, rotation with the write of keys and values, attention."""
KERNELS_PER_STEP = 4
"""Embedding, rotary table, last norm, logits."""
BARRIER_WIDTH = 16
BORDER = 64
KEPT_TOKENS = 32
"""Behind the border, where a decode is measured."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one model that decide how its kernels run."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_layers: int


MODELS = (
    ModelShape("135M", 576, 1536, 9, 3, 64, 49152, 30),
    ModelShape("0.6B", 1024, 3072, 16, 8, 128, 151936, 28),
    ModelShape("1.7B", 2048, 6144, 16, 8, 128, 151936, 28),
    ModelShape("8B", 4096, 12288, 32, 8, 128, 151936, 36),
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """[out_features, in_features]. gated: gate above up, followed by SiLU and product."""

    out_features: int
    in_features: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a kernel cannot do without. bytes: to be fetched from memory (what streams: weights, keys and
    values; activations stay in the caches), or moved where nothing else is done. operations: multiplications and
    additions, of floats, of 8-bit integers, or of bfloat16 into float32."""

    bytes: int
    float_operations: int = 0
    integer_operations: int = 0
    bf16_operations: int = 0

    @property
    def operations(self) -> int:
        """Of all types."""
        return self.float_operations + self.integer_operations + self.bf16_operations


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape, in several types that are measured side by side. rows: tokens of the call (sequences
    for decode, blocks for copies). variants: the work by type."""

    kernel: str
    model: ModelShape
    shape: str
    rows: int
    variants: Mapping[str, Work]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.model.name} {self.shape} x{self.rows}"


def matrices(model: ModelShape) -> dict[str, Matrix]:
    """The matrices of a decoder layer and of the head, by name."""
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "qkv": Matrix(heads + 2 * kv_heads, model.hidden),
        "o": Matrix(model.hidden, heads),
        "gate_up": Matrix(2 * model.intermediate, model.hidden, gated=True),
        "down": Matrix(model.hidden, model.intermediate),
        "lm_head": Matrix(model.vocab, model.hidden),
    }


@dataclass(frozen=True, slots=True)
class LinearType:
    """How a matrix is stored and multiplied. bits: of one weight. group: weights that share a scale (0: none, a row
    when it exceeds the row). scale_bytes: of a scale. offsets: the scale comes with an offset. activations: what they
    are rounded to: "float32" (they are not), "bfloat16" or "int8"."""

    bits: int
    group: int = 0
    offsets: bool = False
    activations: str = "float32"
    scale_bytes: int = FLOAT_BYTES

    def work(self, matrix: Matrix, rows: int) -> Work:
        """Of a product with this many rows."""
        operations = 2 * matrix.out_features * matrix.in_features * rows
        return Work(
            bytes=self.weight_bytes(matrix),
            float_operations=operations if self.activations == "float32" else 0,
            integer_operations=operations if self.activations == "int8" else 0,
            bf16_operations=operations if self.activations == "bfloat16" else 0,
        )

    def weight_bytes(self, matrix: Matrix) -> int:
        """Of the stored matrix, with its scales."""
        size = matrix.out_features * matrix.in_features * self.bits // 8
        if self.group:
            groups = -(-matrix.in_features // self.group) * matrix.out_features
            size += groups * self.scale_bytes * (2 if self.offsets else 1)
        return size


ROW_GROUP = 1 << 30
LINEAR_TYPES: Mapping[str, LinearType] = {
    "f32": LinearType(32),
    "bf16": LinearType(16),
    "f16": LinearType(16),
    "int8": LinearType(8, ROW_GROUP),
    "w16a16": LinearType(16, activations="bfloat16"),
    "w8a8": LinearType(8, ROW_GROUP, activations="int8"),
    "int4": LinearType(4, INT4_GROUP, offsets=True),
    "w4a8": LinearType(4, INT4_GROUP, offsets=True, activations="int8"),
    "fp8": LinearType(8, ROW_GROUP),
    "mxfp4": LinearType(4, MX_GROUP, scale_bytes=1),
}
CACHE_BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "bf16a16": 2, "int8": 1, "fp8": 1}
"""Of an element. bf16a16: a bfloat16 cache that queries and probabilities in bfloat16 are multiplied with."""
STORED_TYPES = ("f32", "bf16", "int8", "fp8")


def kv_bytes(model: ModelShape, cache_type: str, tokens: int) -> int:
    """Of one layer's keys and values. int8: one float32 scale for each head of a token."""
    head = model.head_dim * CACHE_BYTES[cache_type] + (FLOAT_BYTES if cache_type == "int8" else 0)
    return tokens * 2 * model.num_kv_heads * head


def linear_cases(model: ModelShape) -> Iterator[Case]:
    for shape, matrix in matrices(model).items():
        for rows in LINEAR_ROWS:
            if shape == "lm_head" and rows > HEAD_ROWS:
                continue
            variants = {name: kind.work(matrix, rows) for name, kind in LINEAR_TYPES.items()}
            yield Case("linear", model, shape, rows, variants)


def attention_variants(model: ModelShape, tokens: int, operations: int) -> dict[str, Work]:
    """Attention over the keys and values of `tokens` tokens."""
    return {
        name: Work(
            kv_bytes(model, name, tokens),
            float_operations=0 if name == "bf16a16" else operations,
            bf16_operations=operations if name == "bf16a16" else 0,
        )
        for name in CACHE_BYTES
    }


def decode_cases(model: ModelShape) -> Iterator[Case]:
    """Each sequence has one new token, whose key and value are written too, and `context` tokens with it."""
    for context in CONTEXTS:
        for rows in DECODE_ROWS:
            operations = 4 * rows * context * model.num_heads * model.head_dim
            yield Case("decode", model, str(context), rows, attention_variants(model, rows * context, operations))


def prefill_cases(model: ModelShape) -> Iterator[Case]:
    """One sequence from its start: each token sees those before it and itself."""
    for rows in PREFILL_ROWS:
        operations = 4 * model.num_heads * model.head_dim * (rows * (rows + 1) // 2)
        yield Case("prefill", model, "prompt", rows, attention_variants(model, rows, operations))


def write_cases(model: ModelShape) -> Iterator[Case]:
    """Rotation of query and key heads and the write of keys and values: rows of qkv read, heads and pages written."""
    width = (2 * model.num_heads + 3 * model.num_kv_heads) * model.head_dim * FLOAT_BYTES
    for rows in LAYER_ROWS:
        variants = {name: Work(rows * width + kv_bytes(model, name, rows)) for name in STORED_TYPES}
        yield Case("write", model, "qkv", rows, variants)


def copy_cases(model: ModelShape) -> Iterator[Case]:
    """Whole blocks of one layer: read and written."""
    for rows in COPIED_BLOCKS:
        variants = {name: Work(2 * kv_bytes(model, name, rows * BLOCK_SIZE)) for name in STORED_TYPES}
        yield Case("copy", model, "blocks", rows, variants)


def norm_cases(model: ModelShape) -> Iterator[Case]:
    """RMSNorm over the hidden state, from the caches and back to them."""
    for rows in LAYER_ROWS:
        values = rows * model.hidden
        yield Case("norm", model, "hidden", rows, {"f32": Work(2 * values * FLOAT_BYTES, 4 * values)})


def barrier_cases(model: ModelShape) -> Iterator[Case]:
    """As many kernels as a decoding step has, of one norm of 16 values each: what is left is that threads start and
    wait for one another."""
    kernels = model.num_layers * KERNELS_PER_LAYER + KERNELS_PER_STEP
    yield Case("barrier", model, "step", 1, {"f32": Work(kernels * 2 * BARRIER_WIDTH * FLOAT_BYTES)})


def rotation_cases(model: ModelShape) -> Iterator[Case]:
    """The cosines and sines of the rows' positions."""
    for rows in LAYER_ROWS:
        yield Case("rotation", model, "head_dim", rows, {"f32": Work(rows * model.head_dim * FLOAT_BYTES)})


def embed_cases(model: ModelShape) -> Iterator[Case]:
    """Rows of the vocabulary matrix, as floats."""
    for rows in LAYER_ROWS:
        values = rows * model.hidden
        variants = {name: Work(values * (CACHE_BYTES[name] + FLOAT_BYTES)) for name in ("f32", "bf16")}
        yield Case("embed", model, "vocab", rows, variants)


def choose_cases(model: ModelShape) -> Iterator[Case]:
    """A token for each row of logits: the best one, or one drawn from the best 50 and 90 % of what they weigh."""
    for shape in ("greedy", "filtered"):
        for rows in DECODE_ROWS:
            yield Case("choose", model, shape, rows, {"f32": Work(rows * model.vocab * FLOAT_BYTES)})


def logprobs_cases(model: ModelShape) -> Iterator[Case]:
    """Log-probability and rank of one token of each row, and the five best."""
    for rows in DECODE_ROWS:
        yield Case("logprobs", model, "top5", rows, {"f32": Work(rows * model.vocab * FLOAT_BYTES)})


def delta_cases(model: ModelShape) -> Iterator[Case]:
    """The gated delta rule: a prompt (products with the state at a border, among the tokens behind it, and the next
    border's state), and one token of each sequence, whose state and kept rows are read."""
    keys, values, key_dim, value_dim = DELTA_HEADS
    for rows in PREFILL_ROWS:
        token = 3 * 2 * key_dim * value_dim + BORDER // 2 * 2 * 2 * value_dim
        operations = rows * (values * token + keys * BORDER // 2 * 2 * 2 * key_dim)
        state = rows // BORDER * 2 * values * key_dim * value_dim * FLOAT_BYTES
        yield Case("delta", model, "delta-prompt", rows, {"f32": Work(state, operations)})
    kept = values * key_dim * value_dim + KEPT_TOKENS * (keys * key_dim + values * value_dim)
    for rows in DECODE_ROWS:
        operations = rows * values * (2 * 2 * key_dim * value_dim + KEPT_TOKENS * 4 * (key_dim + value_dim))
        yield Case("delta", model, "delta-decode", rows, {"f32": Work(rows * kept * FLOAT_BYTES, operations)})


KERNELS: Mapping[str, Callable[[ModelShape], Iterator[Case]]] = {
    "linear": linear_cases,
    "decode": decode_cases,
    "prefill": prefill_cases,
    "write": write_cases,
    "copy": copy_cases,
    "norm": norm_cases,
    "barrier": barrier_cases,
    "rotation": rotation_cases,
    "embed": embed_cases,
    "delta": delta_cases,
    "choose": choose_cases,
    "logprobs": logprobs_cases,
}
ATTENTION_KERNELS = ("decode", "prefill", "write", "copy")
"""Of these, models with the same heads are one case ..."""
SAMPLING_KERNELS = ("choose", "logprobs")
"""... and of these, models with the same vocabulary."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Names of what is to be measured; None: all there are."""

    kernels: Sequence[str] | None = None
    models: Sequence[str] | None = None
    shapes: Sequence[str] | None = None
    rows: Sequence[int] | None = None
    types: Sequence[str] | None = None


QUICK = Selection(
    models=("135M", "0.6B"),
    shapes=("gate_up", "down", "1024", "prompt", "hidden", "step", "greedy", "filtered"),
    rows=(1, 8, 128, 512),
)


def select(selection: Selection) -> list[Case]:
    """The chosen cases with the chosen types, kernel by kernel. Raises UserError for a name that no case has, and
    when nothing is left."""
    every = every_case()
    _check("kernels", selection.kernels, KERNELS)
    _check("models", selection.models, (model.name for model in MODELS))
    _check("shapes", selection.shapes, (case.shape for case in every))
    _check("rows", selection.rows, (case.rows for case in every))
    _check("types", selection.types, (name for case in every for name in case.variants))
    chosen = []
    for case in every:
        variants = {name: work for name, work in case.variants.items() if _is_chosen(name, selection.types)}
        if (
            variants
            and _is_chosen(case.kernel, selection.kernels)
            and _is_chosen(case.model.name, selection.models)
            and _is_chosen(case.shape, selection.shapes)
            and _is_chosen(case.rows, selection.rows)
        ):
            chosen.append(replace(case, variants=variants))
    if not chosen:
        raise UserError("no kernel has all of the chosen shapes, rows and types together")
    return _without_repeats(chosen)


def every_case() -> list[Case]:
    """All cases of all models, kernel by kernel."""
    return [case for make in KERNELS.values() for model in MODELS for case in make(model)]


def _without_repeats(cases: Sequence[Case]) -> list[Case]:
    """Of models for which a kernel does the same, the first."""
    seen = set()
    kept = []
    for case in cases:
        model = case.model
        alike: object = model.name
        if case.kernel in ATTENTION_KERNELS:
            alike = (model.num_heads, model.num_kv_heads, model.head_dim)
        elif case.kernel in SAMPLING_KERNELS:
            alike = model.vocab
        elif case.kernel == "delta":
            alike = DELTA_HEADS
        key = (case.kernel, alike, case.shape, case.rows)
        if key not in seen:
            kept.append(case)
        seen.add(key)
    return kept


def _is_chosen(value: object, chosen: Sequence[object] | None) -> bool:
    return chosen is None or value in chosen


def _check(option: str, chosen: Sequence[object] | None, known: Iterable[object]) -> None:
    names = list(dict.fromkeys(map(str, known)))
    for name in map(str, chosen or ()):
        if name not in names:
            raise UserError(
                f"--{option}: {name!r}{nearest_name(name, names)} (known: {', '.join(names)})", param=option
            )
