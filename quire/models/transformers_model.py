"""A model without a file of its own here: Transformers' modelling code, with Quire's attention and linear layers.

The code is built without weights, and run once on shapes alone to see what each layer's attention is. Then linear
layers, embeddings and the attention function are replaced; norms, activations and the order of it all stay theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.attention.interface import LayerAttention, PlannedStep
from quire.config.fallback import import_transformers
from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES, ModelConfig
from quire.errors import ModelLoadError
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.layers.operations import HeadWeights
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.models.eager_calls import Attend, EagerCalls
from quire.quantization.integer_weight import WeightSource, copy_into
from quire.quantization.interface import LayerLinear, LinearShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "quire_paged"
"""The name of our attention in Transformers' table of attention functions."""
UNQUANTIZED = re.compile(r"(^|[._])(gate|router)$")
"""Names of the small linear layers that choose experts: their weights stay as they are."""
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotations whose frequencies Transformers' code chooses by the longest sequence of a batch."""
NO_INTERFACE = "its code there does not use the attention interface"
_ATTEND = "quire_attend"
"""The attribute of a module of Transformers that computes its attention."""
_PROBE_TOKENS = 3


class TransformersModel:
    """CausalLM over a Transformers class. Activations are in `context.dtype`."""

    def __init__(self, config: ModelConfig, context: LayerContext, calls: EagerCalls) -> None:
        """Raises ModelLoadError for a class that is not there, or computes in a way that cannot be replaced."""
        self._context = context
        self._calls = calls
        self._cache_dtype = config.kv_cache_dtype
        self._model = model = _without_weights(config)
        self._attention = _PagedAttention()
        self._shapes = []
        for module, shape in _probe(model, config):
            heads = HeadWeights(shape, None, None)
            context.operations.check_heads(heads)
            setattr(module, _ATTEND, partial(self._attention, calls.attend(heads)))
            self._shapes.append(shape)
        self.slots: WeightSlots = {}
        """Where each tensor of a checkpoint goes."""
        self._replace_modules(config)
        self._fill_parameters()
        self._fill_buffers()
        conversions = _conversions(model)
        self._merge_experts(conversions)
        self._names, self._renamings = _checkpoint_names(model, config, conversions)
        # The head runs without the body, with all that the model's code does to logits.
        self._body: nn.Module = model.get_submodule(model.base_model_prefix)
        self._computed = _Computed()
        setattr(model, model.base_model_prefix, self._computed)

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

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        token_ids, positions, rows = batch.token_ids, batch.positions, batch.logits_rows
        assert isinstance(token_ids, torch.Tensor), "modelling code takes tensors"
        assert isinstance(positions, torch.Tensor), "modelling code takes tensors"
        with self._attention.during(batch.attention):
            output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        if rows is None:
            return hidden
        assert isinstance(rows, torch.Tensor), "modelling code takes tensors"
        return hidden.index_select(0, rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
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

    def _replace_modules(self, config: ModelConfig) -> None:
        context, model = self._context, self._model
        tables: dict[str, tuple[LayerLinear, Any]] = {}
        for name, module in list(model.named_modules()):
            if type(module) is nn.Embedding:
                method = context.vocabulary if module.num_embeddings == config.vocab_size else context.positions
                shape = LinearShape(module.embedding_dim, module.num_embeddings, False, context.dtype, context.device)
                tables[f"{name}.weight"] = (method, self._create(name, method, shape))
                model.set_submodule(name, _Lookup(self._calls.lookup(*tables[f"{name}.weight"])))
        tied = dict(getattr(model, "_tied_weights_keys", None) or {}) if config.shape.is_tied else {}
        for name, module in list(model.named_modules()):
            if type(module) is not nn.Linear:
                continue
            table = tables.get(tied.get(f"{name}.weight", ""))
            if table is None:
                shape = LinearShape(
                    module.in_features, module.out_features, module.bias is not None, context.dtype, context.device
                )
                method = self._method(name, module)
                table = method, self._create(name, method, shape)
            elif module.bias is not None:
                raise ModelLoadError(f"{name} shares the embedding's matrix and has a bias: that is not computed")
            model.set_submodule(name, _Linear(self._calls.linear(*table)))

    def _method(self, name: str, module: nn.Linear) -> LayerLinear:
        if module is self._model.get_output_embeddings():
            return self._context.vocabulary
        return self._context.positions if UNQUANTIZED.search(name) else self._context.linear

    def _create(self, name: str, method: LayerLinear, shape: LinearShape) -> Any:
        parameters, rows = method.create(shape), shape.out_features
        sizes = {"weight": (rows, shape.in_features)} | ({"bias": (rows,)} if shape.bias else {})
        for suffix, size in sizes.items():
            load = partial(_load_rows, method, parameters, suffix, rows)
            self.slots[f"{name}.{suffix}"] = WeightSlot(size, load, method.stored_bytes(size))
        return parameters

    def _fill_parameters(self) -> None:
        """Memory for the parameters that no linear layer holds: norms, experts in one tensor."""
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
        """Constants, such as the frequencies of rotations, which the class computes; or which a checkpoint brings."""
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
        """Replace the slots of tensors that hold the matrices of all experts by slots for the experts' own, which is
        how checkpoints have them."""
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


class _PagedAttention:
    """Attention of the layers, over the step that runs."""

    def __init__(self) -> None:
        self._step: PlannedStep | None = None

    @contextmanager
    def during(self, step: PlannedStep) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def __call__(self, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, width] each, keys rotated. Returns [1, T, heads, width of a value]."""
        assert self._step is not None, "attention is computed in steps"
        qkv = torch.cat([heads[0].transpose(0, 1).flatten(1) for heads in (query, key, value)], dim=1)
        return attend(qkv, self._step).view(1, query.shape[2], query.shape[1], value.shape[3])


class _Computed(nn.Module):
    """In the place of a model's body when its head alone runs: hands out what the body computed."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: object, **keywords: object) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class _Linear(nn.Module):
    """In the place of an nn.Linear."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _Lookup(nn.Module):
    """In the place of an nn.Embedding."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self._compute(indices.reshape(-1)).view(*indices.shape, -1)


def _without_weights(config: ModelConfig) -> PreTrainedModel:
    """The class of the model, built of shapes alone. Raises ModelLoadError."""
    transformers = import_transformers()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention_function)
    model_class = getattr(transformers, config.architecture)
    try:
        described = model_class.config_class.from_dict(dict(config.hf))
        described._attn_implementation = ATTENTION
        with torch.device("meta"):
            model: PreTrainedModel = model_class(described)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if reason[0] == repr(ATTENTION):  # looked up in a table of the class's own
            raise ModelLoadError(f"{_refused(config)}: {NO_INTERFACE}") from error
        raise ModelLoadError(f"{config.path}: Transformers cannot build {config.architecture}: {reason[0]}") from error
    return model.eval()


def _refused(config: ModelConfig) -> str:
    return f"{config.path}: {config.architecture} has no code of its own here, and cannot run through Transformers"


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as Transformers' layers call it."""
    attend = getattr(module, _ATTEND)
    if isinstance(attend, _Probe):
        return attend.record(module, query, key, value, **keywords), None
    return attend(query, key, value), None


class _Probe:
    """Notes what the layers ask of their attention."""

    def __init__(self) -> None:
        self.found: list[tuple[nn.Module, LayerAttention]] = []

    def record(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **keywords: object,
    ) -> torch.Tensor:
        if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelLoadError("its attention is not causal")
        if keywords.get("s_aux") is not None:
            raise ModelLoadError("its attention has sinks, which only families with a file of their own have here")
        head_dim, value_dim = query.shape[3], value.shape[3]
        shape = LayerAttention(
            layer=len(self.found),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scaling is None else float(scaling),
            window=sliding_window,
            soft_cap=softcap,
            value_dim=None if value_dim == head_dim else value_dim,
        )
        self.found.append((module, shape))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value_dim)


def _probe(model: PreTrainedModel, config: ModelConfig) -> list[tuple[nn.Module, LayerAttention]]:
    """The modules that attend, in the order in which they run, and what each one's attention is. Raises ModelLoadError
    for a model that computes otherwise."""
    refused = _refused(config)
    described = model.config
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        if any(kind in BATCH_DEPENDENT_ROPE for kind in (rope.values() if isinstance(rope, dict) else (rope,))):
            raise ModelLoadError(f"{refused}: its rotation ({rope}) depends on the other sequences of a batch")
    probe = _Probe()
    for module in model.modules():
        setattr(module, _ATTEND, probe)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    experts = getattr(described, "_experts_implementation", None)
    described._experts_implementation = "batched_mm"  # of shapes alone: the others read which experts were chosen
    try:
        with torch.no_grad():
            model.get_submodule(model.base_model_prefix)(input_ids=tokens, position_ids=tokens, use_cache=False)
    except ModelLoadError as error:
        raise ModelLoadError(f"{refused}: {error.message}") from None
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{refused}: {NO_INTERFACE} ({reason[0]})") from error
    finally:
        described._experts_implementation = experts
        for module in model.modules():
            delattr(module, _ATTEND)
    modules = [module for module, _ in probe.found]
    if not modules or len(set(modules)) != len(modules):
        raise ModelLoadError(f"{refused}: {NO_INTERFACE}")
    kinds = getattr(described, "layer_types", None) or ["full_attention"] * len(modules)
    windows = [shape.window is not None for _, shape in probe.found]
    if windows != [kind == "sliding_attention" for kind in kinds] or "chunked_attention" in kinds:
        raise ModelLoadError(f"{refused}: its masks are not those of full and sliding attention")
    return probe.found


def _checkpoint_names(
    model: PreTrainedModel, config: ModelConfig, conversions: Iterable[Any]
) -> tuple[CheckpointNames, list[Any]]:
    """What names mean in a checkpoint of this class, and how Transformers renames them."""
    from transformers.core_model_loading import WeightRenaming

    patterns = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if config.shape.is_tied:
        patterns += [f"^{re.escape(name)}$" for name in getattr(model, "_tied_weights_keys", None) or {}]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return CheckpointNames(f"{model.base_model_prefix}.", re.compile("|".join(patterns))), renamings


def _conversions(model: PreTrainedModel) -> list[Any]:
    """How Transformers brings the tensors of this class's checkpoints to its parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def _expert_slots(prefix: str, sources: Iterable[str], merged: torch.Tensor) -> WeightSlots:
    """merged: [experts, rows of all sources, columns]. sources: names of one expert's tensors, with * for its
    number."""
    names = list(sources)
    rows = merged.shape[1] // len(names)
    slots: WeightSlots = {}
    for expert in range(len(merged)):
        for place, name in enumerate(names):
            part = merged[expert, place * rows : (place + 1) * rows]
            own = f"{prefix}{name.replace('*', str(expert))}"
            slots[own] = WeightSlot(tuple(part.shape), partial(copy_into, part), part.nbytes)
    return slots


def _load_rows(method: LayerLinear, parameters: Any, suffix: str, num_rows: int, tensor: WeightSource) -> None:
    method.load_rows(parameters, suffix, tensor.narrow(0, 0, num_rows), 0, num_rows)
