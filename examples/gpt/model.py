"""A small GPT over bytes: grouped-query attention, SwiGLU, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .position import POSITIONS, Places, RelativeBias

# q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, heads_kv, head_dim] -> like q.
# Causal, and aligned to the bottom right: the last query sees every key. By keyword it gets those
# of the options alibi_slopes, bias, sink and dropout_p that the model has a use for.
Attend = Callable[..., Tensor]

_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    context: int  # the most tokens that one token sees
    vocabulary: int = 256  # bytes
    position: str = "rotary"  # of POSITIONS
    sink: bool = False  # whether each head learns a logit that its softmax may attend to
    dropout: float = 0.0  # share of the attention probabilities, in training

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def __str__(self) -> str:
        extras = ", sinks" if self.sink else ""
        extras += f", dropout {self.dropout:g}" if self.dropout else ""
        return (
            f"{self.layers} layers of width {self.width}, {self.heads} heads of {self.head_dim} "
            f"on {self.heads_kv} kv heads, context {self.context}, {self.position} positions"
            f"{extras}"
        )


class KVCache:
    """Keys and values of one layer for the last `context` tokens."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._k: Tensor | None = None  # [batch, seqlen_k, heads_kv, head_dim]
        self._v: Tensor | None = None

    def seqlen_k(self, fresh: int) -> int:
        """How many keys there are once `fresh` ones are appended."""
        kept = 0 if self._k is None else self._k.shape[1]
        return min(kept + fresh, self._context)

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
        self._dropout = shape.dropout
        self._heads = (shape.heads, shape.heads_kv, shape.heads_kv)
        self.qkv = nn.Linear(shape.width, sum(self._heads) * shape.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim)
        self.k_norm = nn.RMSNorm(shape.head_dim)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.sink = nn.Parameter(torch.zeros(shape.heads)) if shape.sink else None

    def options(self) -> dict[str, Any]:
        """The layer's own options of `attention`."""
        options: dict[str, Any] = {} if self.sink is None else {"sink": self.sink}
        if self.training and self._dropout:
            options["dropout_p"] = self._dropout  # its seed comes from PyTorch's generator
        return options

    def forward(self, x: Tensor, places: Places, cache: KVCache | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (sum(self._heads), -1))
        q, k, v = qkv.split(self._heads, dim=2)  # (batch, seqlen, heads or heads_kv, head_dim)
        q, k = self.q_norm(q.float()), self.k_norm(k.float())  # float: under autocast they are not
        if places.angles is not None:
            q, k = rotate(q, places.angles), rotate(k, places.angles)
        q, k = q.type_as(v), k.type_as(v)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.out(self._attend(q, k, v, **places.options, **self.options()).flatten(2))


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

    def forward(self, x: Tensor, places: Places, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), places, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits of the next byte. `attend` is all that it knows of attention."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.position = POSITIONS[shape.position](shape.heads, shape.head_dim)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith("out"):  # each block adds to the residual stream twice
                    std /= math.sqrt(2 * self.shape.layers)
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RelativeBias):
                module.initialise()

    def new_caches(self) -> list[KVCache]:
        return [KVCache(self.shape.context) for _ in self.blocks]

    def attention_options(self) -> dict[str, Any]:
        """What attention is told in a step of training, beside q, k and v."""
        length = self.shape.context
        places = self.position(torch.arange(length, device=self.embedding.weight.device), length)
        return {**places.options, **self.blocks[0].attention.options()}

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
        seqlen_k = caches[0].seqlen_k(tokens.shape[1]) if caches else tokens.shape[1]
        places = self.position(position, seqlen_k)
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, places, caches[layer] if caches else None)
        return F.linear(self.norm(x), self.embedding.weight)
