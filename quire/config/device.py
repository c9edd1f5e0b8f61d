from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

CUDA_GRAPHS = ("none", "full", "piecewise", "full_and_piecewise")
WITHIN_HOST, BETWEEN_HOSTS, BETWEEN_DEVICES = "shared_memory", "gloo", "nccl"
"""Names of collectives (quire/parallel/choice.py): over memory that ranks share, without, and between CUDA devices."""
NATIVE_HEAD_MULTIPLE, NATIVE_HEAD_LIMIT = 8, 256
"""Head sizes of the native kernels: multiples of the first number up to the second."""

NATIVE_RANK_LIMIT, NATIVE_LATENT_LIMIT = 512, 640
"""Limits of the native kernels: compressed part of a latent, and whole latent, in elements."""


NATIVE_INDEX_HEADS, NATIVE_INDEX_DIM, NATIVE_INDEX_TOP = 64, 256, 8192
"""Limits of an indexer in the native kernels: heads, elements of a head, chosen keys."""


def why_no_index(num_heads: int, dim: int, top: int) -> str | None:
    """Reason why the native CPU kernels cannot compute this sparse-attention indexer (`dim`: elements a head); None:
    they can."""
    if num_heads > NATIVE_INDEX_HEADS or dim % NATIVE_HEAD_MULTIPLE or dim > NATIVE_INDEX_DIM or top > NATIVE_INDEX_TOP:
        return (
            f"an indexer of {num_heads} heads of {dim} elements that chooses {top} keys is not one of at most "
            f"{NATIVE_INDEX_HEADS} heads of a multiple of {NATIVE_HEAD_MULTIPLE} up to {NATIVE_INDEX_DIM} and at most "
            f"{NATIVE_INDEX_TOP} keys, as its kernels need"
        )
    return None


def why_no_latents(rank: int, rope_dim: int) -> str | None:
    """Reason why the native CPU kernels cannot compute latents of these elements; None: they can."""
    if rank % NATIVE_HEAD_MULTIPLE or rank > NATIVE_RANK_LIMIT or rope_dim % 2 or rank + rope_dim > NATIVE_LATENT_LIMIT:
        return (
            f"latents of {rank} + {rope_dim} elements are not a multiple of {NATIVE_HEAD_MULTIPLE} up to "
            f"{NATIVE_RANK_LIMIT} and an even number, {NATIVE_LATENT_LIMIT} together, as its kernels need"
        )
    return None


@dataclass(frozen=True)
class DeviceConfig:
    """Settings of the computing device; fields with an option's name have its meaning, resolved. attention_backend:
    "native" (native CPU kernels for the whole model), "torch" (plain operators on the CPU) or "triton" ("cuda", or
    "cpu" in Triton's interpreter). cpu_isa: highest instruction set of native kernels. matmul_precision: rounding of
    activations before they multiply bfloat16 or quantised weights, keys or values: "float32": none; "bfloat16"; "auto":
    the faster one; "fp8": to FP8 beside FP8 weights. platform: quire/worker/platform/choice.py. collectives:
    quire/parallel/choice.py."""

    device: str
    num_threads: int
    attention_backend: str
    cpu_isa: str = "auto"
    matmul_precision: str = "float32"
    cuda_graphs: str = "none"
    cuda_graph_sizes: tuple[int, ...] = ()
    batch_invariant: bool = True
    platform: str = "cpu"
    collectives: str = BETWEEN_HOSTS

    @property
    def is_accelerated(self) -> bool:
        return self.attention_backend == "triton"

    @property
    def has_full_graphs(self) -> bool:
        """True if steps with one new token per sequence run as one CUDA graph."""
        return self.cuda_graphs in ("full", "full_and_piecewise")

    @property
    def has_piecewise_graphs(self) -> bool:
        """True if other steps run as CUDA graphs between the layers' attention."""
        return self.cuda_graphs in ("piecewise", "full_and_piecewise")


def has_native_kernels() -> bool:
    return importlib.util.find_spec("quire.kernels.cpu._native") is not None


LARGEST_SIZE = 1024
"""Largest graph, in tokens; larger passes gain nothing by one."""
_STEPS = ((4, None), (64, 8), (256, 16), (512, 32), (LARGEST_SIZE, 64))
"""(limit, distance): rungs below the limit are this far apart; None: each doubles."""


def default_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """CUDA graph sizes in tokens up to the larger of LARGEST_SIZE and `max_num_seqs`, within the token budget."""
    limit = min(max(LARGEST_SIZE, max_num_seqs), max_num_batched_tokens)
    return tuple(sorted({*(size for size in _rungs(limit) if size <= limit), max_num_seqs}))


def _rungs(limit: int) -> Iterable[int]:
    size = 1
    while size <= limit:
        yield size
        step = next((step for up_to, step in _STEPS if size < up_to), 128)
        size += size if step is None else step - size % step
