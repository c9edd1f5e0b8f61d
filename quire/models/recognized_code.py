"""Recognition, by a digest of `forward`, of Transformers modules that a kernel can replace; other code runs
unchanged."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from quire.layers.context import LayerContext
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm

# Digests of functions (`_digest_of`). The functions themselves are Transformers'.
_RMS_NORM = "11d60e04b79887e153d964d27dcb63969cb23ae8644f8f5090cb8eb290d4284c"
"""Digest of LLaMA's norm: x over the root of its mean square plus `variance_epsilon`, in x's dtype, times the
weight."""
_GATED_MLP = "c9a05f6e5bf9014cd921b7554c6d138b4fcb8aeb52f33a17a4eac499766578d0"
"""Digest of LLaMA's MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
_APPLY_ROTARY = "963609e0b3edae40efb7addd97dff4be4d86273f1832a7994b5ed266e337af1a"
"""Digest of LLaMA's rotation: x cos + rotate_half(x) sin."""
_ROTATE_HALF = "b9656802d8276a4b8a25430ff138a4a16c7171e2c37cf0ce35af4bcdc2cf78d2"
"""Digest of rotate_half: the negated second half, then the first."""
_ROTARY = "apply_rotary_pos_emb"
_PARTS_OF_MLP = ("gate_proj", "up_proj", "down_proj")

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Function with apply_rotary_pos_emb's signature."""


Norm = RMSNorm | LayerNorm


def own_norm(module: nn.Module) -> Callable[[LayerContext], Norm] | None:
    """Factory of the layer that replaces a norm of Transformers; None for other modules."""
    if type(module) is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            return None
        affine, has_bias = module.elementwise_affine, module.bias is not None
        return partial(LayerNorm, module.normalized_shape[0], module.eps, affine=affine, bias=has_bias)
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or not _is_code(type(module).forward, _RMS_NORM):
        return None
    return partial(RMSNorm, len(parameters["weight"]), float(cast("float", module.variance_epsilon)))


def own_mlp(module: nn.Module) -> Callable[[LayerContext], GatedMLP] | None:
    """Factory of the layer that replaces a gated MLP; None for other modules."""
    if not _is_code(type(module).forward, _GATED_MLP):
        return None
    parts = [getattr(module, name) for name in _PARTS_OF_MLP]
    activation = _activations().get(type(cast("nn.Module", module.act_fn)))
    biases = {part.bias is not None for part in parts if type(part) is nn.Linear}
    if activation is None or len(biases) != 1 or any(type(part) is not nn.Linear for part in parts):
        return None
    gate = parts[0]
    bias = biases.pop()
    return lambda context: GatedMLP(gate.in_features, gate.out_features, activation, bias=bias, context=context)


def replace_rotation(module: nn.Module, rotate: Callable[[Rotate], Rotate]) -> bool:
    """Make a module's `forward` call rotate(apply_rotary_pos_emb) in place of apply_rotary_pos_emb; other users keep
    it. Returns False, changing nothing, if that function is not LLaMA's."""
    forward = type(module).forward
    names = getattr(forward, "__globals__", {})
    known, half = names.get(_ROTARY), names.get("rotate_half")
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or known is None or half is None:
        return False
    if _ROTARY not in forward.__code__.co_names:
        return False
    if not (_is_code(known, _APPLY_ROTARY) and _is_code(half, _ROTATE_HALF)):
        return False
    own = FunctionType(
        forward.__code__, {**names, _ROTARY: rotate(known)}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)
    return True


@cache
def _is_code(function: Callable[..., Any], digest: str) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):  # no source to read: compiled, or a callable object
        return False
    return _digest_of(source) == digest


def _digest_of(source: str) -> str | None:
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    others = [function.args.vararg, function.args.kwarg, *function.args.kwonlyargs]
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    written = [ast.unparse(statement) for statement in (*body, *function.args.defaults)]
    outline = repr((arguments, [each.arg for each in others if each is not None], written))
    return hashlib.sha256(outline.encode()).hexdigest()


@cache
def _activations() -> dict[type[nn.Module], str]:
    """Names here of Transformers' activation modules."""
    from transformers.activations import ACT2FN

    return {type(ACT2FN[name]): name for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")}
