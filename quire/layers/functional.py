"""Layers that keep a state, in torch: what these operations mean, and what computes them where there is no kernel. A
row's bits do not depend on what else is in a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.attention.interface import StateStep
from quire.kernels.activation import ACTIVATIONS


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
