"""A plain LLaMA-architecture language model in PyTorch, for training.

Parameter names equal those that Transformers gives ``LlamaForCausalLM`` (less the leading ``model.`` on
the modules here), so that an exported checkpoint needs no renaming.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_BLOCK = 256  # queries taken together on a CPU


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 704
    max_positions: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of shape ``(max_positions, head_dim)`` for rotary position embedding."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to ``x`` of shape ``(batch, heads, length, head_dim)``."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def attention_on_cpu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal grouped-query attention, written out: several times faster to train with on a CPU.

    ``query`` has the shape ``(batch, heads, length, head_dim)``; ``key`` and ``value`` have fewer heads. The
    queries are taken in blocks, each of which sees only the keys up to its own end.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    query = query.reshape(batch, kv_heads, heads // kv_heads, length, head_dim) * head_dim**-0.5
    positions = torch.arange(length, device=query.device)
    outputs = []
    for start in range(0, length, ATTENTION_BLOCK):
        end = min(start + ATTENTION_BLOCK, length)
        block = query[:, :, :, start:end].flatten(2, 3)
        scores = (block @ key[:, :, :end].mT).unflatten(2, (-1, end - start))
        hidden = positions[:end] > positions[start:end, None]
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
        outputs.append((weights.flatten(2, 3) @ value[:, :, :end]).unflatten(2, (-1, end - start)))
    return torch.cat(outputs, dim=3).reshape(batch, heads, length, head_dim)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, size = x.shape
        config = self.config

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(batch, length, count, config.head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj(x), config.num_heads), cos, sin)
        key = rotate(heads(self.k_proj(x), config.num_kv_heads), cos, sin)
        value = heads(self.v_proj(x), config.num_kv_heads)
        if x.device.type == "cpu":
            mixed = attention_on_cpu(query, key, value)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, size))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """A LLaMA-architecture model whose output layer shares the embedding's weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Small normal weights; layers begin as the identity, their output projections being zero."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def _hidden(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[:length], self.sin[:length]
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.embed_tokens.weight)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(hidden).flatten(0, 1).float(), targets.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape ``(batch, length, vocab_size)`` for tokens of shape ``(batch, length)``."""
        return self._logits(self._hidden(tokens))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token cross-entropy in nats, over sequences of ``length + 1`` tokens."""
        return self._loss(self._hidden(tokens[:, :-1]), tokens[:, 1:])

    def compile_parts(self) -> None:
        """Compile the layer, once for all of them, and the loss: much quicker than compiling the whole."""
        for layer in self.layers:
            layer.compile(dynamic=False)
        self._loss = torch.compile(self._loss, dynamic=False)

    def parameter_count(self) -> int:
        """Number of learnt parameters; the shared embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
