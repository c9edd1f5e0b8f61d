"""The Muon optimiser: momentum whose update is orthogonalised, for the matrices inside the layers.

Each update is scaled to the root-mean-square size an AdamW update typically has, so learning rates and
weight decay carry over from AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration that drives singular values towards one


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """An approximation of the nearest semi-orthogonal matrix, by Newton-Schulz iteration in bfloat16."""
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; for two-dimensional parameters."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
