"""Mixtures of experts and layers that keep a state, in torch: what these operations mean, and what computes them where
there is no kernel. A row's bits do not depend on what else is in a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from quire.attention.interface import StateStep
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.matmul import row_linear

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""x: [T, K], weight: [N, K], bias: [N] or None -> [T, N]; a row depends on its own x alone."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen for a token. scoring: softmax over all experts, or the sigmoid of each score. renormalise:
    the weights of the chosen add up to 1. factor: of the weights. bias: [num_experts] float32, added to the scores
    for the choice alone, or None."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    factor: float = 1.0
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gated feed-forward blocks. gate_up: [num_experts, 2 * intermediate, size], gate above up; down: [num_experts,
    size, intermediate]. activation: a name of `kernels/activation.py`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of `shape` in the state that `layer` keeps of each sequence, `offset` bytes from a page's beginning."""

    layer: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def rows(self, states: StateStep) -> torch.Tensor:
        """[num_blocks, *shape], the pool's memory."""
        part = states.pages[self.layer][:, self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """A causal convolution of each channel by itself. kernel: [channels, width], the last for the token itself; bias:
    [channels] or None. activation: a name of `kernels/activation.py`, or None. state: the last width - 1 inputs,
    [channels, width - 1]."""

    kernel: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    state: StatePart


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Heads of a gated delta rule. state: [num_heads, key_dim, value_dim]."""

    num_heads: int
    key_dim: int
    value_dim: int
    state: StatePart


def route(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    """[T, num_experts] -> [T, num_experts] float32: the weights of a token's top_k experts, 0 for all others. Of equal
    scores, the expert with the lower number is chosen."""
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if routing.scoring == "softmax" else 1.0 / (torch.exp(-wide) + 1.0)
    preference = scores if routing.bias is None else scores + routing.bias
    chosen = preference.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        total = weights[:, :1]
        for column in range(1, routing.top_k):
            total = total + weights[:, column : column + 1]
        weights = weights / total
    return torch.zeros_like(scores).scatter(1, chosen, weights * routing.factor)


def experts(weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """x: [T, size]. routing: [T, num_experts], as `route` gives it. Returns [T, size]: the weighted sum of the chosen
    experts' results, added in the order of their numbers. An expert computes the tokens that chose it."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(weights.down)):
        rows = routing[:, expert].nonzero().squeeze(1)
        if len(rows):
            result = _expert(weights, expert, x.index_select(0, rows), row_linear) * routing[rows, expert, None]
            out.index_copy_(0, rows, out.index_select(0, rows) + result)
    return out.to(x.dtype)


def experts_without_waiting(
    weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, product: Product
) -> torch.Tensor:
    """As `experts`, but every expert computes all tokens: which of them chose it is never asked of the device."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(weights.down)):
        weight = routing[:, expert, None]
        result = _expert(weights, expert, x, product) * weight
        out = torch.where(weight == 0, out, out + result)
    return out.to(x.dtype)


def _expert(weights: ExpertWeights, expert: int, x: torch.Tensor, product: Product) -> torch.Tensor:
    """[N, size] -> [N, size] float32."""
    gate, up = product(x, weights.gate_up[expert], None).chunk(2, dim=-1)
    return product(ACTIVATIONS[weights.activation](gate) * up, weights.down[expert], None).float()


def short_convolution(weights: ConvolutionWeights, x: torch.Tensor, states: StateStep) -> torch.Tensor:
    """[T, channels] -> [T, channels]; each sequence continues from its state, which is brought up to date."""
    kept = _load(weights.state, states)
    out = torch.empty_like(x)
    for place, tokens, sequences in _token_by_token(states):
        window = torch.cat((kept[sequences], x[tokens].float()[:, :, None]), dim=2)
        total = window[:, :, 0] * weights.kernel[:, 0].float()
        for tap in range(1, weights.kernel.shape[1]):
            total = total + window[:, :, tap] * weights.kernel[:, tap].float()
        if weights.bias is not None:
            total = total + weights.bias.float()
        if weights.activation is not None:
            total = ACTIVATIONS[weights.activation](total)
        out[tokens] = total.to(x.dtype)
        kept[sequences] = window[:, :, 1:]
        _store(weights.state, states, kept, place, sequences)
    return out


def gated_delta_rule(
    rule: DeltaRule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: StateStep,
) -> torch.Tensor:
    """For each token and head, with S the state that the tokens before it left: S = exp(decay) S; S = S + key (beta
    (value - S' key))'; the result is S' query.

    query, key: [T, num_heads * key_dim]; value: [T, num_heads * value_dim]; decay, beta: [T, num_heads]. Returns [T,
    num_heads * value_dim] in value's dtype; computed in float32.
    """
    kept = _load(rule.state, states)
    keys = (rule.num_heads, rule.key_dim)
    queries, all_keys = query.float().unflatten(1, keys), key.float().unflatten(1, keys)
    values = value.float().unflatten(1, (rule.num_heads, rule.value_dim))
    factors = torch.exp(decay.float())
    out = torch.empty_like(values)
    for place, tokens, sequences in _token_by_token(states):
        state = kept[sequences] * factors[tokens][:, :, None, None]
        column = all_keys[tokens][:, :, :, None]
        delta = (values[tokens] - _sum_keys(state * column)) * beta[tokens].float()[:, :, None]
        state = state + column * delta[:, :, None, :]
        out[tokens] = _sum_keys(state * queries[tokens][:, :, :, None])
        kept[sequences] = state
        _store(rule.state, states, kept, place, sequences)
    return out.flatten(1).to(value.dtype)


def _sum_keys(products: torch.Tensor) -> torch.Tensor:
    """[n, heads, key_dim, value_dim] -> [n, heads, value_dim], halves added to halves: one order for any n."""
    while products.shape[2] > 1:
        half = products.shape[2] // 2
        rest = products[:, :, 2 * half :]
        products = torch.cat((products[:, :, :half] + products[:, :, half : 2 * half], rest), dim=2)
    return products[:, :, 0]


def _load(part: StatePart, states: StateStep) -> torch.Tensor:
    """The sequences' states as float32, [S, *shape]: zeros for those that begin."""
    blocks = (states.starts - 1).clamp(min=0)[:, None] // states.interval
    kept = part.rows(states)[states.tables[part.layer].gather(1, blocks)[:, 0].long()].float()
    begins = (states.starts == 0).view(-1, *[1] * len(part.shape))
    return torch.where(begins, torch.zeros_like(kept), kept)


def _store(part: StatePart, states: StateStep, kept: torch.Tensor, place: int, sequences: torch.Tensor) -> None:
    """Write the states [S, *shape] of those `sequences` whose block, or step, ends with their token number `place` of
    the step."""
    counts = torch.tensor(states.query_start).diff()
    ends = (states.starts + place + 1)[sequences]
    sequences = sequences[(ends % states.interval == 0) | (counts[sequences] == place + 1)]
    blocks = (states.starts + place)[sequences, None] // states.interval
    part.rows(states)[states.tables[part.layer][sequences].gather(1, blocks)[:, 0].long()] = kept[sequences].to(
        part.dtype
    )


def _token_by_token(states: StateStep) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(i, tokens [n], their sequences [n] int64): each sequence's token number i of the step, for those that have as
    many."""
    starts = states.query_start
    counts = [end - start for start, end in itertools.pairwise(starts)]
    for place in range(max(counts, default=0)):
        sequences = [index for index, count in enumerate(counts) if count > place]
        tokens = [starts[index] + place for index in sequences]
        yield place, torch.tensor(tokens), torch.tensor(sequences)
