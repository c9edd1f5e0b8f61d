"""Layers with recurrent state (short convolution, gated delta rule, gated norm): their reference in torch. A page holds
the state after a *border*, a multiple of STATE_BORDER tokens, and later rows
(docs/decisions/0026-kv-groups.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from quire.attention.interface import StateStep
from quire.config.model_shape import KEPT_ROWS, STATE_BORDER
from quire.kernels.activation import ACTIVATIONS, silu
from quire.kernels.arguments import NORM_EPSILON, TILE, ConvolutionWeights, DeltaRule, GatedNormWeights, StatePart


def short_convolution(weights: ConvolutionWeights, x: torch.Tensor, states: StateStep) -> torch.Tensor:
    width, channels = weights.kernel.shape
    kept, num_kept = weights.inputs.blocks(states)[..., :channels], max(1, weights.num_kept)
    behind = torch.arange(-weights.num_kept, 0, device=states.starts.device)
    positions = states.starts[:, None] + behind
    slots = (positions % num_kept).to(x.device)
    read = kept[_read_blocks(states, weights.layer)[:, None], slots]
    inputs = torch.cat((torch.where((positions < 0)[..., None].to(x.device), 0.0, read).flatten(0, 1), x.float()))
    windows, tails, blocks, ends = _windows(states, width, weights)
    total = torch.zeros_like(x, dtype=torch.float32)
    for tap, kernel in enumerate(weights.kernel.float()):
        total = total + inputs[windows[:, tap].to(x.device)] * kernel
    if weights.bias is not None:
        total = total + weights.bias.float()
    if weights.activation is not None:
        total = ACTIVATIONS[weights.activation](total)
    kept[blocks[:, None], ((ends[:, None] + behind) % num_kept).to(x.device)] = inputs[tails.to(x.device)]
    return total.to(x.dtype)


def _windows(states: StateStep, width: int, weights: ConvolutionWeights) -> tuple[torch.Tensor, ...]:
    """Indices into kept inputs (`num_kept` per sequence) and then the step's tokens: [T, width] per token; [N,
    num_kept] for N blocks to write; these blocks, [N]; and token counts at their ends."""
    kept, num_seqs = weights.num_kept, len(states.starts)
    windows, tails, sequences, numbers, ends = [], [], [], [], []
    for index, (start, (first, last)) in enumerate(
        zip(states.starts.tolist(), pairwise(states.query_start), strict=True)
    ):
        behind = torch.arange(num_seqs * kept + first, num_seqs * kept + last)
        rows = torch.cat((torch.arange(index * kept, (index + 1) * kept), behind))
        windows.append(rows[kept - (width - 1) :].unfold(0, width, 1))
        for block in range(start // states.interval, (start + last - first - 1) // states.interval + 1):
            end = min(start + last - first, (block + 1) * states.interval) - start
            tails.append(rows[end : end + kept])
            sequences.append(index)
            numbers.append(block)
            ends.append(start + end)
    table = states.tables[weights.layer]
    blocks = table[torch.tensor(sequences, device=table.device), torch.tensor(numbers, device=table.device)]
    return torch.cat(windows), torch.stack(tails), blocks.long(), torch.tensor(ends, device=states.starts.device)


def gated_norm(weights: GatedNormWeights, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    heads = x.float().unflatten(1, (-1, weights.size))
    scale = torch.rsqrt((heads * heads).mean(-1, keepdim=True) + weights.epsilon)
    return ((heads * scale * weights.weight).flatten(1) * silu(gate.float())).to(x.dtype)


def gated_delta_rule(rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor, states: StateStep) -> torch.Tensor:
    """Reference of `Operations.gated_delta_rule`.

    For each token n and value head, with state S from earlier tokens: S = exp(g) S; S = S + k (beta (v - S' k))'; the
    result is S' q. q and k are normalised to length 1, and q is divided by sqrt(key_dim).

    Computed from the state C at the last border, with G the sum of g since then:
    u_n = beta_n (v_n - exp(G_n) C' k_n - sum over i < n of exp(G_n - G_i) (k_n k_i) u_i),
    result_n = exp(G_n) C' q_n + sum over i <= n of exp(G_n - G_i) (q_n k_i) u_i,
    and at the next border C = exp(G) C + sum over i of exp(G - G_i) k_i u_i' (arXiv:2412.06464, the chunkwise form).
    """
    width = rule.num_key_heads * rule.key_dim
    query, key, value = qkv.float().split((width, width, rule.num_value_heads * rule.value_dim), dim=1)
    query = _unit(query.unflatten(1, (rule.num_key_heads, rule.key_dim))) * rule.key_dim**-0.5
    key = _unit(key.unflatten(1, (rule.num_key_heads, rule.key_dim)))
    value = value.unflatten(1, (rule.num_value_heads, rule.value_dim))
    beta, gate = gates.float().chunk(2, dim=1)
    log_decay = -rule.rate * _softplus(gate + rule.time_bias)
    frames = _Frames.load(rule, states)
    out = torch.zeros_like(value)
    for tiles in _tiles(states, qkv.device):
        frames.add_tokens(tiles, key, log_decay)
        frames.compute(tiles, query, key, value, 1.0 / (torch.exp(-beta) + 1.0), out)
        frames.pass_borders(tiles)
        frames.store(tiles, rule, states)
    return out.flatten(1).to(qkv.dtype)


@dataclass(slots=True)
class _Tiles:
    """Next tokens of P sequences, to the end of a tile at an absolute multiple of TILE. rows: [P, TILE], in the tile's
    frame. tokens: [P, TILE], of the step; -1 for other rows. ends: [P], tokens computed afterwards. is_last: [P], True
    if the step or a block ends with the tile."""

    sequences: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor
    is_last: torch.Tensor

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence, row and token of each token."""
        piece, column = (self.tokens >= 0).nonzero(as_tuple=True)
        return self.sequences[piece], self.rows[piece, column], self.tokens[piece, column]


def _tiles(states: StateStep, device: torch.device) -> Iterator[_Tiles]:
    """Step's tokens: each sequence's first tile, then each second one, and so on."""
    places = states.starts.tolist()
    ends = [start + last - first for start, (first, last) in zip(places, pairwise(states.query_start), strict=True)]
    left = [index for index, (place, end) in enumerate(zip(places, ends, strict=True)) if place < end]
    while left:
        columns: list[tuple[int, int, int, bool]] = []
        tokens = torch.full((len(left), TILE), -1)
        for piece, index in enumerate(left):
            place, last = places[index], ends[index]
            tile = place // TILE * TILE
            end = min(tile + TILE, last)
            token = states.query_start[index + 1] - (last - place)
            tokens[piece, place - tile : end - tile] = torch.arange(token, token + end - place)
            columns.append((index, tile % STATE_BORDER, end, end == last or end % states.interval == 0))
            places[index] = end
        sequences, first_rows, reached, is_last = (torch.tensor(column) for column in zip(*columns, strict=True))
        rows = first_rows[:, None] + torch.arange(TILE)
        yield _Tiles(*(each.to(device) for each in (sequences, rows, tokens, reached, is_last)))
        left = [index for index in left if places[index] < ends[index]]


@dataclass(slots=True)
class _Frames:
    """States of a step's S sequences, float32. state: [S, value heads, key_dim, value_dim]. keys, updates, decays:
    of the STATE_BORDER tokens after the border, [S, heads, STATE_BORDER, dim] (decays without dim); later rows are
    zero."""

    state: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor

    @classmethod
    def load(cls, rule: DeltaRule, states: StateStep) -> _Frames:
        blocks = _read_blocks(states, rule.layer)
        is_kept = torch.arange(STATE_BORDER, device=blocks.device) < (states.starts % STATE_BORDER)[:, None]
        is_kept = is_kept.to(blocks.device)[:, None]

        def rows(part: StatePart, width: int) -> torch.Tensor:
            read = part.blocks(states)[blocks][:, :, :KEPT_ROWS, :width]
            return torch.where(is_kept[..., None], F.pad(read, (0, 0, 0, STATE_BORDER - KEPT_ROWS)), 0.0)

        state = rule.state.blocks(states)[blocks][..., : rule.value_dim]
        begins = (states.starts == 0).to(blocks.device)
        decays = F.pad(rule.decays.blocks(states)[blocks][..., :KEPT_ROWS], (0, STATE_BORDER - KEPT_ROWS))
        return cls(
            torch.where(begins[:, None, None, None], 0.0, state),
            rows(rule.keys, rule.key_dim),
            rows(rule.updates, rule.value_dim),
            torch.where(is_kept, decays, 0.0),
        )

    def add_tokens(self, tiles: _Tiles, key: torch.Tensor, log_decay: torch.Tensor) -> None:
        sequences, rows, tokens = tiles.flat()
        self.keys[sequences, :, rows] = key[tokens]
        self.decays[sequences, :, rows] = log_decay[tokens]

    def compute(
        self,
        tiles: _Tiles,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute the tiles' rows of `out`, [T, value heads, value_dim], and their updates."""
        sequences, group = tiles.sequences, self.state.shape[1] // self.keys.shape[1]
        query, key, value, beta = (_take(each, tiles.tokens) for each in (query, key, value, beta))
        sums = self.decays[sequences].cumsum(-1)
        own = sums.gather(2, tiles.rows[:, None].expand(-1, sums.shape[1], -1))
        rows = torch.arange(STATE_BORDER, device=tiles.rows.device)
        decays = torch.exp((own[..., None] - sums[:, :, None]).clamp(max=0.0))
        earlier, state = self.keys[sequences].transpose(2, 3), self.state[sequences]
        is_before = (rows < tiles.rows[..., None])[:, None]
        to_keys = _heads(_product(key, earlier), group) * decays * is_before
        to_query = (
            _heads(_product(query, earlier), group) * decays * (is_before | (rows == tiles.rows[..., None])[:, None])
        )
        right = value - torch.exp(own)[..., None] * _product(_heads(key, group), state)
        updates, pieces = self.updates[sequences], torch.arange(len(sequences), device=sequences.device)
        for column in torch.nonzero((tiles.tokens >= 0).any(0)).flatten().tolist():
            one = slice(column, column + 1)
            update = (right[:, :, one] - _product(to_keys[:, :, one], updates)) * beta[:, :, one, None]
            place = (pieces, slice(None), tiles.rows[:, column])
            is_token = (tiles.tokens[:, column] >= 0)[:, None, None]
            updates[place] = torch.where(is_token, update[:, :, 0], updates[place])
        self.updates[sequences] = updates
        results = torch.exp(own)[..., None] * _product(_heads(query, group), state) + _product(to_query, updates)
        piece, column = (tiles.tokens >= 0).nonzero(as_tuple=True)
        out[tiles.tokens[piece, column]] = results[piece, :, column]

    def pass_borders(self, tiles: _Tiles) -> None:
        """Advance the states of sequences whose tile ends at a border."""
        passing = tiles.sequences[tiles.ends % STATE_BORDER == 0]
        if not len(passing):
            return
        sums = self.decays[passing].cumsum(-1)
        left = torch.exp(sums[..., -1:] - sums)[..., None]
        keys = _heads(self.keys[passing], self.state.shape[1] // self.keys.shape[1]) * left
        added = _product(keys.transpose(2, 3), self.updates[passing])
        self.state[passing] = torch.exp(sums[..., -1])[..., None, None] * self.state[passing] + added
        for rows in (self.keys, self.updates, self.decays):
            rows[passing] = 0.0

    def store(self, tiles: _Tiles, rule: DeltaRule, states: StateStep) -> None:
        """Write the pages of blocks that end with the tiles."""
        sequences, ends = tiles.sequences[tiles.is_last], tiles.ends[tiles.is_last]
        if not len(sequences):
            return
        blocks = states.tables[rule.layer][sequences, (ends - 1) // states.interval].long()
        rule.state.blocks(states)[..., : rule.value_dim][blocks] = self.state[sequences]
        for part, rows in ((rule.keys, self.keys), (rule.updates, self.updates)):
            part.blocks(states)[..., : rows.shape[-1]][blocks] = rows[sequences][:, :, :KEPT_ROWS]
        rule.decays.blocks(states)[..., :KEPT_ROWS][blocks] = self.decays[sequences][..., :KEPT_ROWS]


def _read_blocks(states: StateStep, layer: int) -> torch.Tensor:
    """[S] int64: block with each sequence's state before the step; arbitrary for new sequences."""
    table = states.tables[layer]
    numbers = (states.starts - 1).clamp(min=0).to(table.device) // states.interval
    return table.gather(1, numbers[:, None])[:, 0].long()


def _take(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[T, heads, ...] at tokens [P, TILE] -> [P, heads, TILE, ...], zeros for -1."""
    taken = x[tokens.clamp(min=0)]
    is_token = (tokens >= 0).view(*tokens.shape, *[1] * (x.dim() - 1))
    return torch.where(is_token, taken, 0.0).transpose(1, 2)


def _heads(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, dim=1)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + NORM_EPSILON)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in float64, for decays."""
    wide = x.double()
    return (wide.clamp(min=0.0) + torch.log1p(torch.exp(-wide.abs()))).float()
