"""A small GPT over bytes: rotary embeddings, grouped-query attention, SwiGLU, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, heads_kv, head_dim] -> like q.
# Causal, and aligned to the bottom right: the last query sees every key.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROTARY_BASE = 10_000.0
_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    context: int  # the most tokens that one token sees
    vocabulary: int = 256  # bytes

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.width}, {self.heads} heads of {self.head_dim} "
            f"on {self.heads_kv} kv heads, context {self.context}"
        )


class KVCache:
    """Keys and values of one layer for the last `context` tokens."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._k: Tensor | None = None  # [batch, seqlen_k, heads_kv, head_dim]
        self._v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends, forgets what is too old, and returns all that is kept."""
        if self._k is not None and self._v is not None:
            k, v = torch.cat((self._k, k), dim=1), torch.cat((self._v, v), dim=1)
        self._k, self._v = k[:, -self._context :], v[:, -self._context :]
        return self._k, self._v


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding: turns each pair (i, i + head_dim / 2) of `x`, `[batch, seqlen, heads,
    head_dim]`, by `angles`, `[seqlen, head_dim / 2]` or `[batch, seqlen, head_dim / 2]`."""
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)  # (.., 1, head_dim / 2)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self._heads = (shape.heads, shape.heads_kv, shape.heads_kv)
        self.qkv = nn.Linear(shape.width, sum(self._heads) * shape.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim)
        self.k_norm = nn.RMSNorm(shape.head_dim)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, cache: KVCache | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (sum(self._heads), -1))
        q, k, v = qkv.split(self._heads, dim=2)  # (batch, seqlen, heads or heads_kv, head_dim)
        q, k = self.q_norm(q.float()), self.k_norm(k.float())  # float: under autocast they are not
        q, k = rotate(q, angles).type_as(v), rotate(k, angles).type_as(v)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.out(self._attend(q, k, v).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 64 * math.ceil(8 * width / 3 / 64)  # as many parameters as an MLP of 4 * width
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape, attend)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape.width)

    def forward(self, x: Tensor, angles: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits of the next byte. `attend` is all that it knows of attention."""

    frequencies: Tensor  # radians per token, [head_dim / 2]

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        pairs = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        self.register_buffer("frequencies", _ROTARY_BASE**-pairs, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith("out"):  # each block adds to the residual stream twice
                    std /= math.sqrt(2 * self.shape.layers)
                nn.init.normal_(module.weight, std=std)

    def new_caches(self) -> list[KVCache]:
        return [KVCache(self.shape.context) for _ in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        caches: Sequence[KVCache] | None = None,
        position: int | Tensor = 0,
    ) -> Tensor:
        """`[batch, seqlen]` -> `[batch, seqlen, vocabulary]`.

        Args:
            tokens: the bytes; with caches, those that follow what the caches hold.
            caches: one for each layer, extended by this call.
            position: of the first token, or of each token `[batch, seqlen]`.
        """
        if isinstance(position, int):
            position = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        angles = position[..., None] * self.frequencies  # (seqlen, head_dim / 2), maybe per batch
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, caches[layer] if caches else None)
        return F.linear(self.norm(x), self.embedding.weight)
