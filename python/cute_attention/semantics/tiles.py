"""Sequences of one length in the blockwise backend: their layout, tiles, and a tile's scores.

Inside, tensors are packed: `[batch, seqlen, heads, dim]` becomes
`[batch * heads_kv, seqlen * group, dim]` with `group = heads // heads_kv`. So the query heads that
share a kv head are rows of one matrix, nothing of K or V is repeated, a block of queries is a slice
of rows, and a tile of scores `[batch * heads_kv, rows * group, cols]` is one batched matmul.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import Arguments
from .dropout import keep_mask

# Scores in a tile: 4 MB of float32 stay in the last level of cache of a CPU; a GPU wants more work
# in each launch.
_TILE_SCORES_CPU = 2**20
_TILE_SCORES_GPU = 2**23
_LOG2_E = math.log2(math.e)

_MIN_ROWS, _MIN_COLS = 64, 128
_GOOD_TILE = 256 * 512  # scores of one head that keep a matmul efficient


@dataclass(frozen=True)
class Tiles:
    """Which queries and keys meet, in integers; no tensor is read. Ranges are half open."""

    seqlen_q: int
    seqlen_k: int
    left: int  # keys before the diagonal that a query sees; at least 0, never unbounded
    right: int
    rows: int  # of a tile, in queries
    cols: int

    @classmethod
    def of(cls, call: Arguments, seqlen_q: int, seqlen_k: int, heads: int) -> Tiles:
        """The tiles of sequences of these lengths; `heads` counts those of all: batch * heads."""
        everything = seqlen_q + seqlen_k
        left = call.window_left if call.window_left >= 0 else everything
        right = call.window_right if call.window_right >= 0 else everything
        scores = (_TILE_SCORES_GPU if call.q.is_cuda else _TILE_SCORES_CPU) // max(heads, 1)
        cols = max(_MIN_COLS, 1 << ((max(scores, 1).bit_length()) // 2))
        rows = max(_MIN_ROWS, scores // max(1, min(cols, seqlen_k)))
        rows = max(1, min(rows, seqlen_q, max(_MIN_COLS, left + right + 1)))
        cols = max(1, min(seqlen_k, max(cols, scores // rows)))
        return cls(seqlen_q, seqlen_k, left, right, rows, cols)

    @property
    def shift(self) -> int:
        """What aligns the mask to the bottom right: query i is opposite key i + shift."""
        return self.seqlen_k - self.seqlen_q

    def sighted(self) -> tuple[int, int]:
        """The range of the queries that see a key. Only queries at the beginning may see none,
        because the last query is aligned with the last key."""
        if not self.seqlen_k:
            return (0, 0)
        return (min(self.seqlen_q, max(0, -self.shift - self.right)), self.seqlen_q)

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        first, last = self.sighted()
        for i0 in range(first, last, self.rows):
            yield i0, min(i0 + self.rows, last)

    def col_blocks(self, i0: int, i1: int) -> Iterator[tuple[int, int]]:
        """Blocks of the keys that queries i0 to i1 see between them."""
        first = max(0, i0 + self.shift - self.left)
        last = min(self.seqlen_k, i1 + self.shift + self.right)
        for j0 in range(first, last, self.cols):
            yield j0, min(j0 + self.cols, last)

    def hidden(self, i0: int, i1: int, j0: int, j1: int, device: torch.device) -> Tensor | None:
        """Where the query does not see the key, bool `[rows, cols]`; None where all see all."""

        def everything() -> Tensor:
            return torch.ones(i1 - i0, j1 - j0, dtype=torch.bool, device=device)

        diagonal = i0 + self.shift - j0  # query i0 is opposite this column of the tile
        hidden = None
        if j1 - 1 > i0 + self.shift + self.right:
            hidden = everything().triu_(diagonal + self.right + 1)
        if j0 < i1 - 1 + self.shift - self.left:
            left = everything().tril_(diagonal - self.left - 1)
            hidden = left if hidden is None else hidden.logical_or_(left)
        return hidden


def batch_of_tile(seqlen_q: int, seqlen_k: int, heads: int, gpu: bool) -> int:
    """How many sequences to compute together: short ones share a tile, long ones fill theirs."""
    scores = _TILE_SCORES_GPU if gpu else _TILE_SCORES_CPU
    return max(1, scores // max(1, heads * min(seqlen_q * seqlen_k, _GOOD_TILE)))


@dataclass
class Sequences:
    """Sequences of one length, packed, and what modifies their scores."""

    tiles: Tiles
    batch: int
    heads: int
    heads_kv: int
    q: Tensor  # [batch * heads_kv, seqlen_q * group, head_dim], times scale / (softcap or 1)
    k: Tensor  # [batch * heads_kv, seqlen_k, head_dim]
    v: Tensor  # [batch * heads_kv, seqlen_k, head_dim_v]
    softcap: float  # 0: none
    slopes: Tensor | None  # [batch | 1, heads_kv, 1, group, 1]
    bias: Tensor | None  # [batch | 1, heads_kv | 1, seqlen_q | 1, group | 1, seqlen_k | 1]
    dropout_p: float
    dropout_seed: Tensor | None  # None: no dropout
    first_batch_head: int  # batch * heads + head of the first head, to dropout

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv

    def buffer(self) -> Tensor:
        """Memory for the scores of any tile."""
        return self.q.new_empty(self.batch * self.heads * self.tiles.rows * self.tiles.cols)

    def rows(self, packed: Tensor, i0: int, i1: int) -> Tensor:
        """Queries i0 to i1 of a packed `[batch * heads_kv, seqlen_q * group, ...]`."""
        return packed[:, i0 * self.group : i1 * self.group]

    def split(self, scores: Tensor) -> Tensor:
        """View of a tile's scores with every axis apart: `[batch, heads_kv, rows, group, cols]`."""
        return scores.view(
            self.batch, self.heads_kv, scores.shape[1] // self.group, self.group, scores.shape[2]
        )

    def product(self, left: Tensor, right: Tensor, buffer: Tensor) -> Tensor:
        """`left @ right.T` in `buffer`: `[batch * heads_kv, rows * group, cols]`."""
        shape = (left.shape[0], left.shape[1], right.shape[1])
        out = buffer[: math.prod(shape)].view(shape)
        return torch.bmm(left, right.transpose(1, 2), out=out)

    def scores(
        self, i0: int, i1: int, j0: int, j1: int, buffer: Tensor, keep_tanh: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of a tile, masked, in `buffer`; and the softcap's tanh where asked for."""
        scores = self.product(self.rows(self.q, i0, i1), self.k[:, j0:j1], buffer)
        tanh = None
        if self.softcap:
            scores.tanh_()
            tanh = scores.clone() if keep_tanh else None
            scores.mul_(self.softcap)
        split = self.split(scores)
        if self.slopes is not None:
            i = torch.arange(i0, i1, device=scores.device) + self.tiles.shift
            j = torch.arange(j0, j1, device=scores.device)
            distance = (i[:, None, None] - j).abs().to(scores.dtype)  # (rows, 1, cols)
            split.addcmul_(self.slopes, distance, value=-1)
        if self.bias is not None:
            split.add_(bias_tile(self.bias, i0, i1, j0, j1))
        hidden = self.tiles.hidden(i0, i1, j0, j1, scores.device)
        if hidden is not None:  # whose scores may be anything: a bias may be NaN there
            split.masked_fill_(hidden[:, None, :], -torch.inf)
        return scores, tanh

    def kept(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        """Dropout's 1 for kept and 0 for dropped, like a tile of scores; None without dropout."""
        if self.dropout_seed is None:
            return None
        heads = (self.first_batch_head, self.first_batch_head + self.batch * self.heads)
        keep = keep_mask(self.dropout_seed, self.dropout_p, heads, (i0, i1), (j0, j1))
        keep = keep.view(self.batch * self.heads_kv, self.group, i1 - i0, j1 - j0)
        return keep.transpose(1, 2).to(self.q.dtype).flatten(1, 2)


def exp_(tensor: Tensor) -> Tensor:
    """`exp` in place. With a pass to multiply, exp2 still takes less than half the time of exp on a
    CPU, and unlike exp does not slow down twelvefold where it underflows (PyTorch 2.13, Zen 4).
    """
    return tensor.mul_(_LOG2_E).exp2_()


def pack(tensor: Tensor, heads_kv: int, dtype: torch.dtype) -> Tensor:
    """`[batch, seqlen, heads, dim]` to `[batch * heads_kv, seqlen * group, dim]`, maybe a view."""
    batch, seqlen, heads, dim = tensor.shape
    group = heads // heads_kv
    grouped = torch.unflatten(tensor, 2, (heads_kv, group))
    packed = grouped.transpose(1, 2).to(dtype)  # (batch, heads_kv, seqlen, group, dim)
    return packed.reshape(batch * heads_kv, seqlen * group, dim)


def unpack(packed: Tensor, batch: int, group: int) -> Tensor:
    """A view of what `pack` made, `[batch, seqlen, heads_kv, group, dim]`."""
    batch_heads, rows, dim = packed.shape
    return packed.view(batch, batch_heads // batch, rows // group, group, dim).transpose(1, 2)


def split_bias_heads(bias: Tensor, heads_kv: int) -> Tensor:
    """View of `[batch | 1, heads | 1, seqlen_q | 1, seqlen_k | 1]` as `Sequences.bias`."""
    heads = bias.shape[1]
    split = (heads_kv, heads // heads_kv) if heads > 1 else (1, 1)
    return torch.unflatten(bias, 1, split).transpose(2, 3)


def bias_tile(bias: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """The part of a `Sequences.bias` that a tile adds, axes of length 1 kept."""
    rows = slice(i0, i1) if bias.shape[2] > 1 else slice(None)
    cols = slice(j0, j1) if bias.shape[4] > 1 else slice(None)
    return bias[:, :, rows, :, cols]
