"""Qwen3-Next and Qwen 3.5: gated delta nets in most layers, gated attention in the others, dense MLPs or experts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from quire.attention.interface import AttentionStep
from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.arguments import LayerAttention
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.delta_net import DeltaNetShape, GatedDeltaNet
from quire.layers.interleaved import shared_slot
from quire.layers.linear import ColumnParallelLinear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import UnitOffsetRMSNorm
from quire.logging import get_logger
from quire.models.config_values import layer_attention, read_activation, usual_rope
from quire.models.decoder import FeedForward, TextDecoder
from quire.models.draft_head import DraftHead, with_draft_layers
from quire.models.mixture import mixture_block
from quire.quantization.integer_weight import WeightSource
from quire.quantization.quantized_weight import QuantizedWeight
from quire.utils.sizes import format_bytes

logger = get_logger(__name__)

BY_HEAD = ("Qwen3NextForCausalLM",)
"""Classes whose checkpoints group a delta net's rows by key head."""
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


class GatedAttention(Attention):
    """Attention times sigmoid(gate(x)), with head norms that multiply by 1 + weight. The checkpoint's query matrix
    holds each head's query rows, then its gate rows."""

    def __init__(
        self, hidden_size: int, shape: LayerAttention, *, bias: bool, norm_epsilon: float, context: LayerContext
    ) -> None:
        super().__init__(
            hidden_size,
            shape,
            qkv_bias=bias,
            output_bias=bias,
            context=context,
            norm_epsilon=norm_epsilon,
            norm=UnitOffsetRMSNorm,
        )
        self._gate = ColumnParallelLinear(hidden_size, (shape.num_heads * shape.head_dim,), bias=bias, context=context)
        rows = torch.arange(2 * shape.num_heads * shape.head_dim).view(shape.num_heads, 2, shape.head_dim)
        self._orders = rows[:, 0].flatten(), rows[:, 1].flatten()

    def __call__(
        self,
        x: Value,
        residual: Value | None,
        rotation: RotationTable | None,
        step: AttentionStep,
        rows: ReadRows | None = None,
    ) -> Value:
        attended = step.attend(self._heads, self._project(x), rotation)
        if rows is not None:
            attended, x = (self._operations.gather_rows(each, rows) for each in (attended, x))
            residual = None if residual is None else self._operations.gather_rows(residual, rows)
        return self._output(self._operations.gate(attended, self._gate(x)), residual)

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        slots, gates = super().slots(qkv, output, transposed=transposed), self._gate.slots((qkv[0],))
        return slots | {name: shared_slot((slots[name], gate), self._orders) for name, gate in gates.items()}


class HybridLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is a gated delta net or gated attention."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields, family, size = model_fields(config), ARCHITECTURES[config.architecture], config.hidden_size
        epsilon, kept = fields.number("rms_norm_eps", 1e-6), config.shape.layers[layer].attention
        self._norms = tuple(UnitOffsetRMSNorm(size, epsilon, context) for _ in range(2))
        self._net: GatedDeltaNet | None = None
        self._attention: GatedAttention | None = None
        if kept.kind == "state":
            shape = DeltaNetShape(
                size,
                kept.num_heads,
                kept.num_kv_heads,
                kept.key_dim,
                kept.value_dim,
                kept.conv_inputs + 1,
                kept.spare_inputs,
            )
            by_head = config.architecture in BY_HEAD
            self._net = GatedDeltaNet(
                shape,
                layer,
                epsilon=epsilon,
                activation=fields.choice("hidden_act", ["silu", "swish"], "silu"),
                projections_by_head=by_head and not fields.boolean("projections_apart", False),  # apart: GGUF
                gates_by_head=by_head,
                context=context,
            )
        else:
            bias = family.query_bias.read(fields)
            shape_of_heads = layer_attention(config, layer)
            self._attention = GatedAttention(size, shape_of_heads, bias=bias, norm_epsilon=epsilon, context=context)
        self._mlp, self._mlp_slots = mixture_block(config, context, layer) or _dense_block(config, context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        before_mixer, before_mlp = self._norms
        if self._net is not None:
            x = self._net(before_mixer(x), x, batch.states, rows)
        elif self._attention is not None:
            x = self._attention(before_mixer(x), x, rotation, batch.attention, rows)
        return self._mlp(before_mlp(x), x)

    def cache_spec(self) -> LayerSpec:
        mixer = self._net or self._attention
        assert mixer is not None, "a layer has one of the two"
        return mixer.cache_spec()

    def slots(self) -> WeightSlots:
        slots = prefixed("input_layernorm", self._norms[0].slots())
        slots |= prefixed("post_attention_layernorm", self._norms[1].slots())
        slots |= self._mlp_slots
        if self._net is not None:
            return slots | prefixed("linear_attn", self._net.slots())
        assert self._attention is not None, "a layer has one of the two"
        return slots | prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "o_proj"))


def _dense_block(config: ModelConfig, context: LayerContext) -> tuple[FeedForward, WeightSlots]:
    width = model_fields(config).integer("intermediate_size")
    mlp = GatedMLP(config.hidden_size, width, read_activation(config), bias=False, context=context)
    return mlp, prefixed("mlp", mlp.slots())


class HybridDecoder(TextDecoder):
    """Decoder of HybridLayers; only attention layers use rotary positions."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        ropes = [usual_rope(config)] * config.num_layers
        super().__init__(config, context, partial(HybridLayer, config, context), ropes, UnitOffsetRMSNorm)
        self.draft_head: DraftHead | None = None
        if config.shape.draft_layers and context.stage.count == 1:
            layers = _draft_layers(config, replace(context, expert_counts=None))
            self.draft_head = DraftHead(config, layers, self._tokens, self._rotaries[0], self._head, context)
            self.slots |= prefixed("mtp", self.draft_head.slots)

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        if self.draft_head is None:
            weights = _without_drafts(weights)
        super().load_weights(_one_by_one(weights), elsewhere)
        if self.draft_head is not None:
            size = sum(slot.nbytes for name, slot in self.slots.items() if name.startswith("mtp."))
            logger.info("%s of the weights are the head for drafts (load_draft_head=False: none)", format_bytes(size))


def _draft_layers(config: ModelConfig, context: LayerContext) -> list[HybridLayer]:
    first, behind = config.num_layers, with_draft_layers(config)
    return [HybridLayer(behind, context, first + index) for index in range(len(config.shape.draft_layers))]


def _without_drafts(weights: Iterable[tuple[str, WeightSource]]) -> Iterator[tuple[str, WeightSource]]:
    num_skipped = 0
    for name, tensor in weights:
        if name.startswith("mtp."):
            num_skipped += 1
        else:
            yield name, tensor
    if num_skipped:
        logger.info("the head for drafts (%d tensors, mtp.*) is left out", num_skipped)


def _one_by_one(weights: Iterable[tuple[str, WeightSource]]) -> Iterator[tuple[str, WeightSource]]:
    for name, tensor in weights:
        fused = _FUSED.fullmatch(name)
        if fused is None or isinstance(tensor, QuantizedWeight):
            yield name, tensor
            continue
        for expert in range(tensor.shape[0]):
            own, prefix = tensor.narrow(0, expert, 1)[0], f"{fused[1]}.{expert}"
            if fused[2] == "down_proj":
                yield f"{prefix}.down_proj.weight", own
                continue
            for part, rows in zip(("gate", "up"), own.chunk(2), strict=True):
                yield f"{prefix}.{part}_proj.weight", rows
