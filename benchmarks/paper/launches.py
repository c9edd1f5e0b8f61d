"""What CUDA graphs gain in a decode step, modelled: the host starts kernels beside the device, and the later decides.

Eagerly, the host starts every kernel by itself. With piecewise graphs it starts one graph for what lies between two
layers' attention, and attention's kernels eagerly. A full graph is one start. The device needs the cost model's time,
and GRAPH_START longer for each graph that begins.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.simulator.cost import KERNELS_PER_LAYER, KERNELS_PER_STEP, CostModel
from quire.simulator.work import StepWork

EAGER_START = 25e-6
"""Seconds of the host for a kernel: Python, PyTorch's dispatcher and the driver. A decode step of Llama-3.1-8B on an
H100 takes 8.4 ms eagerly (cloudai.pt, "CUDA Graphs + torch.compile"), some 330 kernels."""
GRAPH_LAUNCH, GRAPH_START = 1e-5, 5e-6
"""Of a whole graph: seconds of the host, and of the device before its first kernel."""
ATTENTION_KERNELS = 2
"""Of a layer that piecewise graphs leave out: the write of keys and values, and attention."""

EAGER, PIECEWISE, FULL = "eager", "piecewise", "full"


def decode(batch: int, context: int) -> StepWork:
    """A token of each of `batch` sequences after `context` others, full attention."""
    return StepWork(
        num_tokens=batch, num_sequences=batch, num_sampled=batch, num_decodes=batch,
        decode_context=[batch * context], prefill_context=[0], prefill_pairs=[0],
    )  # fmt: skip


def step_seconds(cost: CostModel, work: StepWork) -> Mapping[str, float]:
    """Seconds of a step, by how its kernels are started."""
    layers = cost.shape.num_layers
    device = cost.step_seconds(work)
    eager_host = (layers * KERNELS_PER_LAYER + KERNELS_PER_STEP) * EAGER_START
    pieces = layers + 1
    piecewise_host = pieces * GRAPH_LAUNCH + layers * ATTENTION_KERNELS * EAGER_START
    return {
        EAGER: max(device, eager_host),
        PIECEWISE: max(device + pieces * GRAPH_START, piecewise_host),
        FULL: device + GRAPH_START,
    }
