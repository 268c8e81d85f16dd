"""Triangle attention, as AlphaFold 2 has it (Jumper et al. 2021, supplement, algorithm 13).

A pair representation has a vector for each two of n residues, `[n, n, channels]`. Its rows attend
to themselves: row `i` is a sequence of the n pairs `(i, j)`. What makes it a triangle is the bias:
the score of `(i, j)` and `(i, k)` also gets a number from the pair `(j, k)`, the same for all rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_attention

# q, k and v [rows, n, heads, head_dim], bias [1, heads, n, n] -> like q
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class TriangleAttention(nn.Module):
    """`[n, n, channels]` -> the same; `attend` is all that it knows of attention."""

    def __init__(self, channels: int, heads: int, head_dim: int, attend: Attend) -> None:
        super().__init__()
        self._heads = heads
        self._attend = attend
        width = heads * head_dim
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * width, bias=False)
        self.bias = nn.Linear(channels, heads, bias=False)
        self.gate = nn.Linear(channels, width)
        self.out = nn.Linear(width, channels)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What attention gets of a normalised pair representation: q, k, v and the bias, in which
        the pair `(j, k)` is the number for query `j` and key `k`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self._heads, -1)).unbind(2)
        bias = self.bias(x).permute(2, 0, 1).contiguous()  # (heads, n, n)
        return q, k, v, bias[None]

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        attended = self._attend(*self.inputs(x)).flatten(2)
        return self.out(torch.sigmoid(self.gate(x)) * attended)


def our_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return cute_attention.attention(q, k, v, bias=bias)


class TorchAttention:
    """PyTorch's scaled_dot_product_attention, the bias as its mask."""

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(self._backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
