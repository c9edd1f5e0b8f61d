"""Replacement of Transformers' modules by this package's layers; modules with a common input run together."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.attention.interface import AttentionStep
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.kernels.arguments import HeadWeights, LayerAttention
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.linear import ColumnParallelLinear
from quire.models.eager_calls import Attend, EagerCalls, Layer, Lookup
from quire.models.recognized_code import Rotate, own_mlp, own_norm, replace_rotation
from quire.models.shared_inputs import Columns, Producer, SharedInput, Taker
from quire.models.transformers_probe import ATTEND, AttentionCall, Probe, probe
from quire.quantization.integer_weight import WeightSource
from quire.quantization.interface import LinearMethod, LinearShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNQUANTIZED = re.compile(r"(^|[._])(gate|router)$")
"""Names of router layers, which are not quantised."""


_Group = Sequence[nn.Module]
"""Modules with a common input, in call order."""
_Own = list[tuple[Layer, list[tuple[nn.Module, Columns]]]]
"""Layers, and the modules whose results each computes."""


class ModuleReplacement:
    """Replaces, at load, modules of a Transformers model built from shapes alone."""

    def __init__(
        self, model: PreTrainedModel, config: ModelConfig, context: LayerContext, calls: EagerCalls, refused: str
    ) -> None:
        """refused: start of error messages. Raises ModelLoadError for an unsupported attention."""
        self.slots: WeightSlots = {}
        """Slots of the replaced modules' checkpoint tensors."""
        self.steps = Steps()
        self._model = model
        self._context = context
        self._calls = calls
        self._names = {module: name for name, module in model.named_modules()}
        norms = {module: own_norm(module) for module in self._names}
        self._norms = {module: make for module, make in norms.items() if make is not None}
        mlps = {module: own_mlp(module) for module in self._names}
        self._mlps = {module: make for module, make in mlps.items() if make is not None}
        linear = [module for module in self._names if type(module) is nn.Linear]
        self._found: Probe = probe(model, refused, [*self._norms, *self._mlps, *linear])
        self.shapes: list[LayerAttention] = [call.shape for call in self._found.attention]
        self._replace_tables(config)
        self._replace_groups()

    def _replace(self, module: nn.Module, own: nn.Module) -> None:
        self._model.set_submodule(self._names[module], own)

    # -- tables, and the matrices that share them ---------------------------------------------------------------------

    def _replace_tables(self, config: ModelConfig) -> None:
        context, model = self._context, self._model
        tables: dict[str, tuple[LinearMethod, Any]] = {}
        for module, name in self._names.items():
            if type(module) is nn.Embedding:
                method = context.vocabulary if module.num_embeddings == config.vocab_size else context.positions
                shape = LinearShape(module.embedding_dim, module.num_embeddings, False, context.dtype, context.device)
                tables[f"{name}.weight"] = (method, self._create(name, method, shape))
                self._replace(module, _Lookup(self._calls.lookup(*tables[f"{name}.weight"])))
        tied = dict(getattr(model, "_tied_weights_keys", None) or {}) if config.shape.is_tied else {}
        seen = {call.module for call in self._found.once()}
        inside = {part for mlp in self._mlps if mlp in seen for part in mlp.children()}
        for module, name in self._names.items():
            if type(module) is not nn.Linear or module in seen or module in inside:
                continue
            table = tables.get(tied.get(f"{name}.weight", ""))
            if table is not None and module.bias is not None:
                raise ModelLoadError(f"{name} shares the embedding's matrix and has a bias: that is not computed")
            layer = self._linear(module) if table is None else partial(_apply, *table)
            self._replace(module, Taker(SharedInput(self._calls.layers([layer])), Columns(0)))

    def _linear(self, module: nn.Linear) -> Layer:
        name, context = self._names[module], self._context
        shape = LinearShape(
            module.in_features, module.out_features, module.bias is not None, context.dtype, context.device
        )
        method = self._method(module)
        return partial(_apply, method, self._create(name, method, shape))

    def _method(self, module: nn.Linear) -> LinearMethod:
        if module is self._model.get_output_embeddings():
            return self._context.vocabulary
        return self._context.positions if UNQUANTIZED.search(self._names[module]) else self._context.linear

    def _create(self, name: str, method: LinearMethod, shape: LinearShape) -> Any:
        parameters, rows = method.create(shape), shape.out_features
        sizes = {"weight": (rows, shape.in_features)} | ({"bias": (rows,)} if shape.bias else {})
        for suffix, size in sizes.items():
            load = partial(_load_rows, method, parameters, suffix, rows)
            self.slots[f"{name}.{suffix}"] = WeightSlot(size, load, method.stored_bytes(size))
        return parameters

    # -- modules that compute from one tensor -------------------------------------------------------------------------

    def _replace_groups(self) -> None:
        calls = self._found.once()
        inside = {part for call in calls if call.module in self._mlps for part in call.module.children()}
        groups: dict[Hashable, list[nn.Module]] = {}
        for call in calls:
            if call.module not in self._norms and call.module not in inside:
                groups.setdefault(call.input.value, []).append(call.module)
        projections = self._projections()
        for call in calls:
            if call.module in self._norms:
                norm = self._norms[call.module](self._context)
                self.slots |= prefixed(self._names[call.module], norm.slots())
                own = self._own_layers(groups.pop(call.output.value, ()), projections)
                compute = self._calls.layers([layer for layer, _ in own], first=norm)
                self._replace(call.module, Producer(compute, self._install(own)))
        for attention in self._found.attention:
            self._replace_attention(attention, self._own_layers(groups.pop(attention.output.value, ()), projections))
        for group in groups.values():
            self._install(self._own_layers(group, projections))

    def _replace_attention(self, call: AttentionCall, behind: _Own) -> None:
        heads = HeadWeights(call.shape, None, None)
        self._context.cache_scales[call.shape.layer] = call.shape.cache_scale
        self._context.operations.check_heads(heads)
        attend = self._calls.attention(heads, [layer for layer, _ in behind])
        attention = _PagedAttention(self.steps, attend, self._install(behind))
        setattr(call.module, ATTEND, attention)
        if call.rotates and self._calls.rotates:
            replace_rotation(call.module, attention.rotate)

    def _own_layers(self, group: _Group, projections: set[_Group]) -> _Own:
        """Layers for a group's modules; those of equal storage share one matrix."""
        own: _Own = []
        merged = {True: [], False: []}  # type: dict[bool, list[nn.Linear]]
        for module in group:
            if module in self._mlps:
                mlp = self._mlps[module](self._context)
                self.slots |= prefixed(self._names[module], mlp.slots())
                own.append((partial(mlp, residual=None), [(module, Columns(len(own)))]))
            elif isinstance(module, nn.Linear) and self._method(module) is self._context.linear:
                merged[module.bias is not None].append(module)
            elif isinstance(module, nn.Linear):
                own.append((self._linear(module), [(module, Columns(len(own)))]))
        for has_bias, modules in merged.items():
            if not modules:
                continue
            widths = [module.out_features for module in modules]
            layer = ColumnParallelLinear(modules[0].in_features, widths, bias=has_bias, context=self._context)
            self.slots |= layer.slots([self._names[module] for module in modules])
            starts = [sum(widths[:place]) for place in range(len(widths))]
            is_whole = tuple(modules) not in projections
            columns = [Columns(len(own), start, width, is_whole) for start, width in zip(starts, widths, strict=True)]
            own.append((layer, list(zip(modules, columns, strict=True))))
        return own

    def _install(self, own: _Own) -> SharedInput | None:
        if not own:
            return None
        shared = SharedInput(self._calls.layers([layer for layer, _ in own]))
        for _, parts in own:
            for module, columns in parts:
                self._replace(module, Taker(shared, columns))
        return shared

    def _projections(self) -> set[_Group]:
        """Triples of linear layers whose results are an attention's query, key and value."""
        by_output = {call.output.elements: call.module for call in self._found.once()}
        found = (tuple(by_output.get(each.elements) for each in call.inputs) for call in self._found.attention)
        return {tuple(module for module in modules if module is not None) for modules in found if None not in modules}


class Steps:
    """Step for which replaced modules run now, and its rotations."""

    def __init__(self) -> None:
        self._running: AttentionStep | None = None
        self._rotations: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    @property
    def running(self) -> AttentionStep:
        assert self._running is not None, "attention is computed in steps"
        return self._running

    @contextmanager
    def during(self, step: AttentionStep) -> Iterator[None]:
        self._running = step
        try:
            yield
        finally:
            self._running = None
            self._rotations.clear()

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
        """Rotation for `Attend`, computed once. cos, sin: [1, T, head_dim]. None if a head's halves rotate by different
        angles."""
        for known_cos, known_sin, rows in self._rotations:
            if known_cos is cos and known_sin is sin:
                return rows
        half = cos.shape[-1] // 2
        first = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
        second = torch.cat([cos[0, :, half:], sin[0, :, half:]], dim=1)
        rows = first if torch.equal(first, second) else None
        self._rotations.append((cos, sin, rows))
        return rows


class _PagedAttention:
    """Attention function of one Transformers layer. shared: results of the layers after it (None: no such layers)."""

    def __init__(self, steps: Steps, attend: Attend, shared: SharedInput | None) -> None:
        self._steps = steps
        self._attend = attend
        self._shared = shared
        self._left: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Query and key whose rotation attention must do, and their rotation."""

    def rotate(self, known: Rotate) -> Rotate:
        def rotate(
            query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self._steps.rotation(cos, sin)
            if rows is None:
                return known(query, key, cos, sin)
            self._left = query, key, rows
            return query, key

        return rotate

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, width] each -> [1, T, heads, width of a value]."""
        rotation = None
        if self._left is not None:
            left_query, left_key, rotation = self._left
            self._left = None
            assert query is left_query, "what was to be rotated is attended with"
            assert key is left_key, "what was to be rotated is attended with"
        qkv = _side_by_side(query, key, value)
        if qkv is None:
            qkv = torch.cat([heads[0].transpose(0, 1).flatten(1) for heads in (query, key, value)], dim=1)
        attended, *behind = self._attend(qkv, rotation, self._steps.running)
        attended = attended.contiguous()
        if self._shared is not None:
            self._shared.put(attended, behind)
        return attended.view(1, query.shape[2], query.shape[1], value.shape[3])


class _Lookup(nn.Module):
    """Stand-in for an nn.Embedding, over this package's table."""

    def __init__(self, compute: Lookup) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self._compute(indices.reshape(-1)).reshape(*indices.shape, -1)


def _side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """[T, width] view over three tensors, [1, heads, T, head_dim] each; None unless a token's parts are in one row."""
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    row = query.stride(2)
    if num_tokens == 1 or row < width or key.shape != value.shape or key.shape[3] != head_dim:
        return None
    strides = head_dim, row, 1
    if not query.stride()[1:] == key.stride()[1:] == value.stride()[1:] == strides:
        return None
    # The memory between the query's first two rows must hold only the three tensors.
    start, size = query.data_ptr(), query.element_size() * head_dim
    if key.data_ptr() != start + num_heads * size or value.data_ptr() != key.data_ptr() + num_kv_heads * size:
        return None
    return query.as_strided((num_tokens, width), (row, 1))


def _apply(method: LinearMethod, parameters: Any, x: Any) -> Any:
    return method.apply(parameters, x)


def _load_rows(method: LinearMethod, parameters: Any, suffix: str, num_rows: int, tensor: WeightSource) -> None:
    method.load_rows(parameters, suffix, tensor.narrow(0, 0, num_rows), 0, num_rows)
