"""Models without a file here: Transformers' modelling code with this package's attention and linear layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.config.fallback import import_transformers
from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES, ModelConfig
from quire.errors import ModelLoadError
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.models.eager_calls import EagerCalls
from quire.models.transformers_modules import ModuleReplacement
from quire.models.transformers_probe import (
    ATTENTION,
    NO_INTERFACE,
    attention_function,
)
from quire.quantization.integer_weight import WeightSource, copy_into

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersModel:
    """CausalLM over a Transformers class. Activations are in `context.dtype`."""

    def __init__(self, config: ModelConfig, context: LayerContext, calls: EagerCalls) -> None:
        """Raises ModelLoadError for a missing class, or one whose computation cannot be replaced."""
        self._context = context
        self._calls = calls
        self._cache_dtype = config.kv_cache_dtype
        self._model = model = _without_weights(config)
        replacement = ModuleReplacement(model, config, context, calls, _refused(config))
        self._steps = replacement.steps
        self._shapes = replacement.shapes
        self.slots: WeightSlots = replacement.slots
        self._fill_parameters()
        self._fill_buffers()
        conversions = _conversions(model)
        self._merge_experts(conversions)
        self._names, self._renamings = _checkpoint_names(model, config, conversions)
        # The head runs without the body, with all that the model's code does to logits.
        self._body: nn.Module = model.get_submodule(model.base_model_prefix)
        self._computed = _Computed()
        setattr(model, model.base_model_prefix, self._computed)

    columns: tuple[str, ...] = ()

    def cache_specs(self) -> list[LayerSpec]:
        dtype = self._cache_dtype
        specs: list[LayerSpec] = []
        for shape in self._shapes:
            widths = (shape.num_kv_heads, shape.head_dim, shape.value_width)
            sizes = (*widths, CACHE_DTYPE_BYTES[dtype], CACHE_SCALE_BYTES.get(dtype, 0))
            spec = AttentionSpec(*sizes) if shape.window is None else SlidingWindowSpec(*sizes, window=shape.window)
            specs.append(spec)
        return specs

    @property
    def output_size(self) -> int:
        size: int = self._model.config.hidden_size
        return size

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        records = batch.hidden, batch.overlay, *batch.taps
        assert records == (None, None), "modelling code takes tokens, and gives the last hidden states"
        token_ids, positions, rows = batch.token_ids, batch.rotary_positions, batch.logits_rows
        assert isinstance(token_ids, torch.Tensor), "modelling code takes tensors"
        assert isinstance(positions, torch.Tensor), "modelling code takes tensors"
        with self._steps.during(batch.attention):
            output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        if rows is None:
            return ForwardResult(hidden)
        assert isinstance(rows, torch.Tensor), "modelling code takes tensors"
        return ForwardResult(hidden.index_select(0, rows))

    def compute_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        self._computed.hidden = hidden[None].to(self._context.dtype)
        logits: torch.Tensor = self._model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long)).logits[0]
        return logits.float() if self._context.device.type == "cpu" else logits

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        renamed = ((self._rename(name), tensor) for name, tensor in weights)
        fill_slots(self.slots, self._names, renamed, elsewhere)

    def release_workspaces(self) -> None:
        self._calls.release()
        self._computed.hidden = None

    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())

    # -- what is replaced -------------------------------------------------------------------------------------------

    def _fill_parameters(self) -> None:
        context = self._context
        for name, parameter in list(self._model.named_parameters()):
            filled = torch.empty(parameter.shape, dtype=context.dtype, device=context.device)
            owner, _, own = name.rpartition(".")
            setattr(self._model.get_submodule(owner), own, nn.Parameter(filled, requires_grad=False))
            is_norm = filled.dim() == 1 and own == "weight"
            self.slots[name] = WeightSlot(
                tuple(filled.shape), partial(copy_into, filled), filled.nbytes, dummy_mean=float(is_norm)
            )

    def _fill_buffers(self) -> None:
        device = self._context.device
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                if name not in module._non_persistent_buffers_set:
                    filled = module._buffers[name]
                    assert filled is not None, "it was just made"
                    slot = WeightSlot(tuple(filled.shape), partial(copy_into, filled), filled.nbytes)
                    self.slots[f"{prefix}.{name}"] = slot
            if module._buffers and device.type != "meta":
                with torch.no_grad():
                    self._model._init_weights(module)

    def _merge_experts(self, conversions: Iterable[Any]) -> None:
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

        for each in conversions:
            if not isinstance(each, WeightConverter):
                continue
            operations = [type(operation) for operation in each.operations]
            whole = [name for name in self.slots if name.endswith(each.target_patterns[0])]
            if not whole:
                continue
            if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]) or len(each.target_patterns) > 1:
                raise ModelLoadError(
                    f"model_impl='transformers' does not load the tensors {each.target_patterns[0]!r} of this family"
                )
            for name in whole:
                del self.slots[name]
                prefix = name.removesuffix(each.target_patterns[0])
                self.slots |= _expert_slots(prefix, each.source_patterns, self._model.get_parameter(name).data)

    def _rename(self, name: str) -> str:
        for each in self._renamings:
            name = each.rename_source_key(name)[0]
        return name


class _Computed(nn.Module):
    """Stand-in for the model's body when only its head runs: returns the body's earlier output."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: object, **keywords: object) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _without_weights(config: ModelConfig) -> PreTrainedModel:
    transformers = import_transformers()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_function)
    model_class = getattr(transformers, config.architecture)
    try:
        described = model_class.config_class.from_dict(dict(config.hf))
        described._attn_implementation = ATTENTION
        with torch.device("meta"):
            model: PreTrainedModel = model_class(described)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if reason[0] == repr(ATTENTION):  # the class looks attention up in a table of its own
            raise ModelLoadError(f"{_refused(config)}: {NO_INTERFACE}") from error
        raise ModelLoadError(f"{config.path}: Transformers cannot build {config.architecture}: {reason[0]}") from error
    return model.eval()


def _refused(config: ModelConfig) -> str:
    return f"{config.path}: {config.architecture} has no code of its own here, and cannot run through Transformers"


def _checkpoint_names(
    model: PreTrainedModel, config: ModelConfig, conversions: Iterable[Any]
) -> tuple[CheckpointNames, list[Any]]:
    from transformers.core_model_loading import WeightRenaming

    patterns = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if config.shape.is_tied:
        patterns += [f"^{re.escape(name)}$" for name in getattr(model, "_tied_weights_keys", None) or {}]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return CheckpointNames(f"{model.base_model_prefix}.", re.compile("|".join(patterns))), renamings


def _conversions(model: PreTrainedModel) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def _expert_slots(prefix: str, sources: Iterable[str], merged: torch.Tensor) -> WeightSlots:
    """Slots of single experts. merged: [experts, rows of all sources, columns]. sources: tensor names, with * for the
    expert's number."""
    names = list(sources)
    rows = merged.shape[1] // len(names)
    slots: WeightSlots = {}
    for expert in range(len(merged)):
        for place, name in enumerate(names):
            part = merged[expert, place * rows : (place + 1) * rows]
            own = f"{prefix}{name.replace('*', str(expert))}"
            slots[own] = WeightSlot(tuple(part.shape), partial(copy_into, part), part.nbytes)
    return slots
