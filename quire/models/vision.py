"""Vision towers of Qwen2.5-VL, Qwen3-VL, Qwen 3.5 and Gemma 3: from patches to token features. A tower runs layer by
layer, with other work between, in torch, Triton or recorded native kernels."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from quire.attention.encoder_backend import EncoderAttention
from quire.attention.interface import AttentionStep
from quire.config.vision import VisionConfig
from quire.errors import ModelLoadError
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import LayerAttention
from quire.kernels.rotation import Rotation, RotationTable
from quire.kernels.value import Value
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import unquantized
from quire.layers.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.models.vision_grid import Grid, GridInputs, blended, copied_to, grid_inputs, reordered
from quire.quantization.integer_weight import WeightSource, copy_into

MERGED_ACTIVATION = "gelu"


class EncoderRun(ABC):
    """Images on their way through a tower, a few layers a step; grids separate their patches."""

    def __init__(self, tower: VisionTower, patches: torch.Tensor, grids: Sequence[Grid]) -> None:
        self._tower = tower
        self._grids = grids
        self._layer = 0
        self._deepstack: list[torch.Tensor] = []
        with torch.inference_mode():
            self._inputs, positions = tower.inputs(grids)
            order = self._inputs.token_order
            if order is not None:
                patches = reordered(patches, order, tower.config.merge_size)
            self._order = None if order is None else copied_to(order, tower.context.device)
            self._begin(self._inputs, patches, positions)

    def advance(self, num_layers: int) -> list[torch.Tensor] | None:
        """Compute the next layers. Returns the result of VisionEncoder.encode after the last one, else None."""
        config, order = self._tower.config, self._order
        assert 0 < num_layers <= config.num_layers - self._layer, "as many layers as are left at most"
        with torch.inference_mode():
            for layer in range(self._layer, self._layer + num_layers):
                self._compute(layer, in_windows=order is not None and layer not in config.whole_layers)
                if layer in config.deepstack_layers:
                    merger = self._tower.deepstack_mergers[config.deepstack_layers.index(layer)]
                    self._deepstack.append(self._merge(merger))
            self._layer += num_layers
            if self._layer < config.num_layers:
                return None
            parts = [self._merge(self._tower.merger), *self._deepstack]
            features = torch.cat([part.float() for part in parts], dim=1)
            if order is not None:
                features[order] = features.clone()
            counts = [frames * rows * columns // config.merge_size**2 for frames, rows, columns in self._grids]
            return list(features.split(counts))

    @abstractmethod
    def _begin(self, inputs: GridInputs, patches: torch.Tensor, positions: list[torch.Tensor]) -> None:
        """Embed the patches and add learned positions, if any."""

    @abstractmethod
    def _compute(self, layer: int, *, in_windows: bool) -> None:
        """Compute one layer. in_windows: patches attend within their window, else within their frame."""

    @abstractmethod
    def _merge(self, merger: Merger) -> torch.Tensor:
        """Features of the hidden states, [tokens of all images, output_size]."""


class VisionEncoder(ABC):
    """Vision tower with its weights, which the worker runs for new images."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self.config = tower.config
        self.device = tower.context.device

    def weight_bytes(self) -> int:
        return self._tower.weight_bytes()

    @abstractmethod
    def release_workspaces(self) -> None:
        """Free working memory, allocated again at need, for sleep. Runs in progress become invalid."""

    @abstractmethod
    def begin_run(self, patches: torch.Tensor, grids: Sequence[Grid]) -> EncoderRun:
        """Start an `encode`, up to the first layer."""

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Encode images. patches: [T, patch_values] float32, concatenated by `grids`, in token order. Returns per image
        [tokens, feature_size] float32: placeholders' embeddings, then deep-stack features for the language model's
        first layers. An image's bits do not depend on the others."""
        found = self.begin_run(patches, grids).advance(self.config.num_layers)
        assert found is not None, "all layers are computed"
        return found


class TowerNames(NamedTuple):
    """Checkpoint names of a tower's parts."""

    patches: str
    positions: str
    layers: str
    merger: str


USUAL_NAMES = TowerNames("patch_embed.proj", "pos_embed.weight", "blocks", "merger")
POOLED_NAMES = TowerNames("embeddings.patch_embedding", "embeddings.position_embedding.weight", "encoder.layers", "")


class VisionLayer:
    """Tower layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VisionConfig, context: LayerContext, layer: int) -> None:
        size, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        shape = LayerAttention(layer, heads, heads, dim, dim**-0.5)
        self._attention_norm = vision_norm(config, size, context)
        self._attention = Attention(size, shape, qkv_bias=True, output_bias=True, context=context)
        self._mlp_norm = vision_norm(config, size, context)
        block = GatedMLP if config.is_gated else MLP
        self._mlp = block(size, config.intermediate_size, config.activation, bias=True, context=context)

        self._is_pooled = config.is_pooled

    def __call__(self, x: Value, rotation: RotationTable | None, step: AttentionStep) -> Value:
        x = self._attention(self._attention_norm(x), x, rotation, step)
        return self._mlp(self._mlp_norm(x), x)

    def slots(self) -> WeightSlots:
        if self._is_pooled:
            assert isinstance(self._mlp, MLP), "the pooled towers' MLPs have two matrices"
            return {
                **prefixed("layer_norm1", self._attention_norm.slots()),
                **prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "out_proj")),
                **prefixed("layer_norm2", self._mlp_norm.slots()),
                **prefixed("mlp", self._mlp.slots("fc1", "fc2")),
            }
        return {
            **prefixed("norm1", self._attention_norm.slots()),
            **prefixed("attn", self._attention.slots(("qkv",), "proj")),
            **prefixed("norm2", self._mlp_norm.slots()),
            **prefixed("mlp", _mlp_slots(self._mlp)),
        }


def vision_norm(config: VisionConfig, size: int, context: LayerContext) -> RMSNorm | LayerNorm:
    return (RMSNorm if config.is_gated else LayerNorm)(size, config.epsilon, context)


def _mlp_slots(mlp: GatedMLP | MLP) -> WeightSlots:
    return mlp.slots() if isinstance(mlp, GatedMLP) else mlp.slots("linear_fc1", "linear_fc2")


class Merger:
    """Two linear layers from a token's patches to its features, after a norm: of each patch, or (norms_merged) of a
    token's merged ones."""

    def __init__(self, config: VisionConfig, context: LayerContext, *, norms_merged: bool) -> None:
        self._merged_size = size = config.merged_size
        self.norms_merged = norms_merged
        self._names = ("ln_q", "mlp.0", "mlp.2") if config.is_gated else ("norm", "linear_fc1", "linear_fc2")
        self._norm = vision_norm(config, size if norms_merged else config.hidden_size, context)
        self._up = ColumnParallelLinear(size, (size,), bias=True, context=context, activation=MERGED_ACTIVATION)
        self._down = RowParallelLinear(size, config.output_size, bias=True, context=context)

    def norm_patches(self, x: Value) -> Value:
        """[T, hidden_size] -> the same shape; only if the merger norms each patch."""
        assert not self.norms_merged, "this merger norms merged patches"
        return self._norm(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T / merge_size ** 2, merged_size]. x: after `norm_patches` if that applies."""
        return x.reshape(-1, self._merged_size)

    def __call__(self, x: Value) -> Value:
        """[T / merge_size ** 2, merged_size] -> [T / merge_size ** 2, output_size]. x: from `gather`."""
        return self._down(self._up(self._norm(x) if self.norms_merged else x), None)

    def slots(self) -> WeightSlots:
        norm, up, down = self._names
        return {**prefixed(norm, self._norm.slots()), **self._up.slots((up,)), **self._down.slots(down)}


class PooledMerger(Merger):
    """Linear layer from the mean of a token's patches to its features, after a norm. Each patch is normed before."""

    norms_merged = False

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        self._num_patches = config.merge_size**2
        self._norm = vision_norm(config, config.hidden_size, context)
        self._mean_norm = UnitOffsetRMSNorm(config.hidden_size, config.epsilon, context)
        self._down = RowParallelLinear(config.hidden_size, config.output_size, bias=False, context=context)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self._num_patches, x.shape[1]).mean(dim=1)

    def __call__(self, x: Value) -> Value:
        return self._down(self._mean_norm(x), None)

    def slots(self) -> WeightSlots:
        (projection,) = self._down.slots("projection", transposed=True).values()
        projector = {"mm_input_projection_weight": projection, **prefixed("mm_soft_emb_norm", self._mean_norm.slots())}
        return {**prefixed("post_layernorm", self._norm.slots()), **prefixed("multi_modal_projector", projector)}


class VisionTower:
    """Layers of a tower, for any kind of values. Each rank has the whole tower; load-time quantisation skips it.
    slots: by checkpoint names without the tower's prefix."""

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        if config.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelLoadError(f"vision_config: hidden_act {config.activation!r:.100} is not supported ({known} are)")
        context = unquantized(context)
        self.config = config
        self.context = context
        has_table = config.table_side > 0
        self.merger = PooledMerger(config, context) if config.is_pooled else Merger(config, context, norms_merged=False)
        self._embedding = RowParallelLinear(config.patch_values, config.hidden_size, bias=has_table, context=context)
        size = (config.table_side**2, config.hidden_size)
        self._positions = torch.empty(size, dtype=context.dtype, device=context.device)
        self._layers = [VisionLayer(config, context, layer) for layer in range(config.num_layers)]
        self.deepstack_mergers = [Merger(config, context, norms_merged=True) for _ in config.deepstack_layers]
        self.slots = self._make_slots()

    def embed(self, patches: Value, positions: Value | None = None) -> Value:
        """[T, patch_values] -> [T, hidden_size]. positions: [T, hidden_size], added and overwritten."""
        return self._embedding(patches, positions)

    def run_layer(self, layer: int, x: Value, rotation: RotationTable | None, step: AttentionStep) -> Value:
        """[T, hidden_size] -> [T, hidden_size]. rotation: None for a pooled tower."""
        return self._layers[layer](x, rotation, step)

    def inputs(self, grids: Sequence[Grid]) -> tuple[GridInputs, list[torch.Tensor]]:
        """Inputs that depend only on the grids: GridInputs, and any learned positions, [T, hidden_size] in the
        context's dtype."""
        found = grid_inputs(grids, self.config)
        if not self.config.table_side:
            return found, []
        table = self._positions
        places, shares = (copied_to(each, table.device) for each in (found.places, found.shares))
        return found, [blended(table, places, shares).to(self.context.dtype)]

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """Load the tower's weights; see CausalLM.load_weights."""
        surplus = re.compile(r"rotary_pos_emb\.inv_freq$|embeddings\.position_ids$|^head\.")
        fill_slots(self.slots, CheckpointNames("", surplus), weights)

    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())

    def _make_slots(self) -> WeightSlots:
        config, table = self.config, self._positions
        names = POOLED_NAMES if config.is_pooled else USUAL_NAMES
        merged = self.merger.slots()
        slots = {**self._embedding.slots(names.patches), **(prefixed(names.merger, merged) if names.merger else merged)}
        if config.table_side:
            slots[names.positions] = WeightSlot(tuple(table.shape), partial(copy_into, table), table.nbytes)
        # A convolution whose kernel is as large as its stride: a product.
        matrix = slots[f"{names.patches}.weight"]
        frames = () if config.is_pooled else (config.frames,)
        kernel = (config.hidden_size, config.channels, *frames, config.patch_size, config.patch_size)
        slots[f"{names.patches}.weight"] = WeightSlot(kernel, partial(_load_kernel, matrix), matrix.nbytes)
        for index, layer in enumerate(self._layers):
            slots |= prefixed(f"{names.layers}.{index}", layer.slots())
        for index, merger in enumerate(self.deepstack_mergers):
            slots |= prefixed(f"deepstack_merger_list.{index}", merger.slots())
        return slots


class TorchVision(VisionEncoder):
    """Encoder in plain torch."""

    def release_workspaces(self) -> None:
        """Does nothing."""

    def begin_run(self, patches: torch.Tensor, grids: Sequence[Grid]) -> EncoderRun:
        return TorchRun(self._tower, patches, grids)


class TorchRun(EncoderRun):
    def _begin(self, inputs: GridInputs, patches: torch.Tensor, positions: list[torch.Tensor]) -> None:
        dtype = self._tower.context.dtype
        self._steps: Sequence[AttentionStep] = [EncoderAttention().plan(batch) for batch in inputs.attention_batches]
        self._rotation: RotationTable | None = None
        if not self._tower.config.is_pooled:
            self._rotation = torch_rotation(inputs.angles, dtype)
        self._x = self._tower.embed(patches.to(dtype), *positions)

    def _compute(self, layer: int, *, in_windows: bool) -> None:
        self._x = self._tower.run_layer(layer, self._x, self._rotation, self._steps[in_windows])

    def _merge(self, merger: Merger) -> torch.Tensor:
        x = self._x if merger.norms_merged else merger.norm_patches(self._x)
        return _tensor(merger(merger.gather(_tensor(x))))


def torch_rotation(angles: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Rotation of a tower's patches. angles: [T, rotary_dim / 2] float32."""
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None])


def _load_kernel(matrix: WeightSlot, tensor: WeightSource) -> None:
    whole = tensor.narrow(0, 0, tensor.shape[0])
    assert isinstance(whole, torch.Tensor), "a kernel is not quantised"
    matrix.load(whole.flatten(1))


def _tensor(value: Value) -> torch.Tensor:
    assert isinstance(value, torch.Tensor), "layers pass on the kind of values that they are given"
    return value
