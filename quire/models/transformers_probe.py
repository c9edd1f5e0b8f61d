"""Run of a Transformers model on shapes: finds attentions' parameters and modules with a common input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.errors import ModelLoadError
from quire.kernels.arguments import LayerAttention
from quire.models.recognized_code import Rotate, replace_rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "quire_paged"
"""Name of this package's attention in Transformers' table."""
ATTEND = "quire_attend"
"""Attribute of a Transformers module with the function that computes its attention."""
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotations whose frequencies depend on the longest sequence of the batch."""
NO_INTERFACE = "its code there does not use the attention interface"
_PROBE_TOKENS = 3


@dataclass(eq=False, slots=True)
class Seen:
    """Tensor at one moment of the observed run; later writes make another value."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        return cls(tensor, tensor._version)

    @property
    def value(self) -> Hashable:
        """Key that is equal for the same elements in the same order, in any shape."""
        tensor = self.tensor
        if not tensor.is_contiguous():
            return id(tensor)
        return (self.elements, tensor.storage_offset())

    @property
    def elements(self) -> Hashable:
        """Key that is equal for the same elements in any order."""
        return (self.tensor.untyped_storage()._cdata, self.tensor.numel(), self.version)


@dataclass(slots=True)
class AttentionCall:
    """One observed attention. module: its caller. rotates: attention may rotate queries and keys itself. inputs: query,
    key and value, unrotated if so."""

    module: nn.Module
    shape: LayerAttention
    rotates: bool
    inputs: tuple[Seen, Seen, Seen]
    output: Seen


@dataclass(slots=True)
class ModuleCall:
    module: nn.Module
    input: Seen
    output: Seen


@dataclass(slots=True)
class Probe:
    """Calls of a Transformers model's modules that a run on shapes observed, in order."""

    attention: list[AttentionCall] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    _rotated: tuple[torch.Tensor, torch.Tensor, Seen, Seen] | None = None
    """Results of the last rotation, and its inputs."""

    def once(self) -> list[ModuleCall]:
        counts: dict[nn.Module, int] = {}
        for call in self.modules:
            counts[call.module] = counts.get(call.module, 0) + 1
        return [call for call in self.modules if counts[call.module] == 1]

    def note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record a module's call (forward hook of watched modules)."""
        if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self.modules.append(ModuleCall(module, Seen.of(inputs[0]), Seen.of(output)))

    def rotate(self, known: Rotate) -> Rotate:
        def rotate(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = known(*arguments, **options)
            self._rotated = None
            if len(arguments) == 4 and not options and arguments[2].shape[-1] == query.shape[-1]:
                self._rotated = query, key, Seen.of(arguments[0]), Seen.of(arguments[1])
            return query, key

        return rotate

    def note_attention(
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
        """Record a call of attention; returns a result of the right shape. Raises ModelLoadError."""
        if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelLoadError("its attention is not causal")
        if keywords.get("s_aux") is not None:
            raise ModelLoadError("its attention has sinks, which only families with a file of their own have here")
        head_dim, value_dim = query.shape[3], value.shape[3]
        shape = LayerAttention(
            layer=len(self.attention),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scaling is None else float(scaling),
            window=sliding_window,
            soft_cap=softcap,
            value_dim=None if value_dim == head_dim else value_dim,
        )
        first, second, rotates = Seen.of(query), Seen.of(key), False
        if self._rotated is not None:
            rotated_query, rotated_key, *unrotated = self._rotated
            unchanged = query._version == key._version == 0
            if rotated_query is query and rotated_key is key and unchanged and value_dim == head_dim:
                first, second, rotates = *unrotated, True
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value_dim)
        inputs = first, second, Seen.of(value)
        self.attention.append(AttentionCall(module, shape, rotates, inputs, Seen.of(output)))
        self._rotated = None
        return output


def probe(model: PreTrainedModel, refused: str, watched: list[nn.Module]) -> Probe:
    """Run the model on shapes and observe it. watched: modules to record. refused: start of error messages. Raises
    ModelLoadError for an unsupported computation."""
    described = model.config
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        if any(kind in BATCH_DEPENDENT_ROPE for kind in (rope.values() if isinstance(rope, dict) else (rope,))):
            raise ModelLoadError(f"{refused}: its rotation ({rope}) depends on the other sequences of a batch")
    found = Probe()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    with _observed(model, found, watched), torch.inference_mode(False), torch.no_grad():
        try:
            model.get_submodule(model.base_model_prefix)(input_ids=tokens, position_ids=tokens, use_cache=False)
        except ModelLoadError as error:
            raise ModelLoadError(f"{refused}: {error.message}") from None
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelLoadError(f"{refused}: {NO_INTERFACE} ({reason[0]})") from error
    modules = [call.module for call in found.attention]
    if not modules or len(set(modules)) != len(modules):
        raise ModelLoadError(f"{refused}: {NO_INTERFACE}")
    kinds = getattr(described, "layer_types", None) or ["full_attention"] * len(modules)
    windows = [call.shape.window is not None for call in found.attention]
    if windows != [kind == "sliding_attention" for kind in kinds] or "chunked_attention" in kinds:
        raise ModelLoadError(f"{refused}: its masks are not those of full and sliding attention")
    return found


@contextmanager
def _observed(model: PreTrainedModel, found: Probe, watched: list[nn.Module]) -> Iterator[None]:
    described = model.config
    experts = getattr(described, "_experts_implementation", None)
    described._experts_implementation = "batched_mm"  # depends only on shapes; others read the chosen experts
    hooks = [module.register_forward_hook(found.note) for module in watched]
    modules = list(model.modules())
    rotating = [module for module in modules if replace_rotation(module, found.rotate)]
    for module in modules:
        setattr(module, ATTEND, found)
    try:
        yield
    finally:
        described._experts_implementation = experts
        for hook in hooks:
            hook.remove()
        for module in modules:
            delattr(module, ATTEND)
        for module in rotating:
            del module.forward


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that Transformers' layers call; it passes on to the probe or the module's replacement."""
    attend: Probe | Callable[..., torch.Tensor] = getattr(module, ATTEND)
    if isinstance(attend, Probe):
        return attend.note_attention(module, query, key, value, **keywords), None
    return attend(query, key, value), None
