from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quire.config.model_shape import DTYPE_BYTES
from quire.config.vision import EncoderCosts, VisionConfig
from quire.errors import UserError
from quire.image_orders import ImageOrders
from quire.prompt_image import PromptImage
from quire.simulator.hardware import Hardware
from quire.simulator.tokens import OWN_TOKENS, first_of_group
from quire.simulator.trace import TraceRequest

KERNELS_PER_LAYER = 10
FEATURE_BYTES = 4
LARGEST_TOKENS = 16_384
"""Tokens of Qwen3-VL's largest picture."""


@dataclass(frozen=True)
class TowerCost:
    """Costs of a tower that each rank has whole. link: latency and bytes per second between ranks."""

    vision: VisionConfig
    hardware: Hardware
    dtype: str
    costs: EncoderCosts
    link: tuple[float, float]

    @property
    def weight_bytes(self) -> int:
        return int(self.vision.num_elements * DTYPE_BYTES[self.dtype])

    def working_bytes(self, max_model_len: int) -> int:
        return self.vision.working_bytes(min(max_model_len, LARGEST_TOKENS))

    def layer_seconds(self, num_tokens: int) -> float:
        """Seconds of one layer for a picture."""
        vision, size = self.vision, self.vision.hidden_size
        patches = num_tokens * vision.merge_size**2
        seen = self.costs.whole_share * patches + (1 - self.costs.whole_share) * min(self.costs.window, patches)
        weights = (4 * size + (3 if vision.is_gated else 2) * vision.intermediate_size) * size
        rate = self.hardware.peak(self.dtype) * self.hardware.factors.attention_compute
        launches = KERNELS_PER_LAYER * self.hardware.launch_overhead
        return self._product(weights, patches) + 4 * size * patches * seen / rate + launches

    def end_seconds(self, num_tokens: int) -> float:
        """Seconds of a picture outside layers: embeddings, mergers, and its features' way to other ranks."""
        vision = self.vision
        merger = (1 if vision.is_pooled else vision.merged_size + vision.output_size) * vision.merged_size
        total = self._product(vision.patch_values * vision.hidden_size, num_tokens * vision.merge_size**2)
        total += (1 + len(vision.deepstack_layers)) * self._product(merger, num_tokens)
        if self.costs.num_ranks > 1:
            latency, bandwidth = self.link
            total += latency + FEATURE_BYTES * num_tokens * vision.feature_size / bandwidth
        return total

    def _product(self, weights: int, rows: int) -> float:
        hardware, size = self.hardware, DTYPE_BYTES[self.dtype]
        by_peak = 2 * weights * (rows + hardware.half_rows) / (hardware.peak(self.dtype) * hardware.factors.compute)
        return max(by_peak, weights * size / (hardware.bandwidth * hardware.factors.bandwidth))


class TowerWork:
    """Running tower seconds of plans' image orders."""

    def __init__(self, cost: TowerCost | None) -> None:
        self._cost = cost
        self._begun: dict[bytes, tuple[int, int]] = {}
        """Tokens and layers left."""

    def seconds(self, orders: ImageOrders | None) -> float:
        """Seconds of the busiest rank."""
        if orders is None:
            return 0.0
        cost = self._cost
        assert cost is not None, "requests have images"
        for key in orders.dropped:
            self._begun.pop(key, None)
        ranks = [0.0] * cost.costs.num_ranks
        for part in orders.slices:
            if part.image is not None:
                self._begun[part.key] = part.image.num_tokens, cost.costs.num_layers
            num_tokens, left = self._begun[part.key]
            ranks[part.rank] += part.num_layers * cost.layer_seconds(num_tokens)
            self._begun[part.key] = num_tokens, left - part.num_layers
            if left == part.num_layers:
                del self._begun[part.key]
                ranks[part.rank] += cost.end_seconds(num_tokens)
        return max(ranks)


def with_images(number: int, tokens: list[int], request: TraceRequest) -> list[int]:
    """Prompt's token ids with those of its pictures put in."""
    start = request.prefix_tokens
    for index, image in enumerate(request.images):
        own = OWN_TOKENS + (number * 31 + index) % OWN_TOKENS
        first = own if image.name is None else first_of_group(f"image {image.name}")
        tokens[start : start + image.num_tokens] = range(first, first + image.num_tokens)
        start += image.num_tokens
    return tokens


def placed(number: int, request: TraceRequest, cost: TowerCost) -> list[PromptImage]:
    """Pictures in a prompt, behind its group's tokens. Raises UserError."""
    found, start, vision = list[PromptImage](), request.prefix_tokens, cost.vision
    for index, image in enumerate(request.images):
        if vision.is_pooled and image.num_tokens != vision.image_tokens:
            raise UserError(
                f"a picture of this model has {vision.image_tokens} tokens, not {image.num_tokens}", param="trace"
            )
        label = f"{number} {index}" if image.name is None else f"named {image.num_tokens} {image.name}"
        key = hashlib.sha256(label.encode()).digest()
        grid = 1, 1, image.num_tokens
        found.append(PromptImage(grid, key, b"", (0, 0), is_encoded=False, is_whole=vision.is_pooled, start=start))
        start += image.num_tokens
    return found
