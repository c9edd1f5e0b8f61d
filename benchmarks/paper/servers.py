"""The paper's servers and the one cost model of all its figures (§6.1, Table 1).

Nothing here is set per figure. Two factors come from the paper's own measurements: what the host takes between two
steps, and for each request of a step. By Little's law Fig. 13 tells how long a step took: 30.4 requests in flight at 2
a second, of 338 tokens each, are 45 ms a step; 132.4 at 30 a second, of 58.45 tokens, are 75 ms. The device needs some
33 and 32 of them, so that the rest, 12 and 43 ms, grows with the batch. The paper's code says why: eager PyTorch under
Python, whose sampler took the requests of a step one after the other, each with several waits for the device
(github.com/vllm-project/vllm/issues/249, June 2023). All systems pay it alike, as all ran in one code.

The host link is that of the paper's machines, A2 of Google Cloud: their processors (Cascade Lake) have PCIe 3, whatever
the device has. Keys and values of a block were copied one by one, layer by layer: two copies where the product has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from quire.config.parallel import ParallelConfig
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.replica import EngineSettings
from quire.simulator.shape import find_shape

GIB = 2**30
HOST_OVERHEAD, HOST_OVERHEAD_PER_REQUEST = 0.002, 0.0003
"""Seconds between two steps in which the host plans and samples, and the device waits."""
PCIE_BANDWIDTH = 1.6e10
"""Bytes per second and direction."""
COPIES_PER_LAYER = 2
MAX_NUM_SEQS = 1024
"""More than ever find room, so that memory alone limits a batch."""
MAX_NUM_BATCHED_TOKENS = 2560
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Server:
    """A model on its machine. kv_memory: bytes over all devices, as in Table 1 (which counts in GiB: 12 of them make
    its 15.7 K slots); weights, slots: the paper's numbers, in GB and tokens."""

    model: str
    gpu: str
    num_gpus: int
    kv_memory: int
    weights: float = 0.0
    slots: float = 0.0

    @property
    def title(self) -> str:
        return self.model.upper().replace("LLAMA", "LLaMA").replace("B", "B")

    @cache  # noqa: B019  the servers are few and live as long as the program
    def cost(self) -> CostModel:
        device = find(self.gpu)
        hardware = replace(
            device,
            host_overhead=HOST_OVERHEAD,
            host_overhead_per_sequence=0.0,
            host_overhead_per_request=HOST_OVERHEAD_PER_REQUEST,
            pcie_bandwidth=PCIE_BANDWIDTH,
            pcie_latency=COPIES_PER_LAYER * device.pcie_latency,
        )
        return CostModel(find_shape(self.model), hardware, ParallelConfig(tp=self.num_gpus))

    def settings(self, **changes: object) -> EngineSettings:
        """The engine as the paper runs it: one step at a time, recomputation, no prefix cache, blocks of 16."""
        settings = EngineSettings(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            kv_cache_memory=self.kv_memory // self.num_gpus,
            enable_prefix_caching=False,
            scheduling_policy="fcfs",
            queue_depth=1,
        )
        return replace(settings, **changes)  # type: ignore[arg-type]


SERVERS: Mapping[str, Server] = MappingProxyType(
    {
        "opt-13b": Server("opt-13b", "a100-40g", 1, 12 * GIB, 26.0, 15_700),
        "opt-66b": Server("opt-66b", "a100-40g", 4, 21 * GIB, 132.0, 9_700),
        "opt-175b": Server("opt-175b", "a100-80g", 8, 264 * GIB, 346.0, 60_100),
        "llama-13b": Server("llama-13b", "a100-40g", 1, 12 * GIB),
    }
)
