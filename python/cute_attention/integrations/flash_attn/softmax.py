"""S_dmask: the matrix that flash-attn returns for tests of dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...checks import window_sides
from ...semantics.dropout import drop_count, keep_mask

_ROUNDED_TO = 128  # both lengths of S_dmask, as upstream's

# Upstream's blocks of keys have their own maxima, so callers ask how wide they are. Here all values
# of a row are relative to its one maximum: a block is wider than any row.
BLOCK_SIZE_N = 2**30


@torch.no_grad()
def dense_softmax(
    q: Tensor,
    k: Tensor,
    options: dict[str, Any],
    dropout_p: float,
    seed: Tensor,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """exp(score - the row's maximum), negative where it was dropped, 0 where a mask hides it.

    It holds every score in float32 at once, and is for tests of dropout alone.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`.
        k: keys `[batch, seqlen_k, heads_kv, head_dim]`.
        options: those of `attention`, of which it reads masks and what changes the scores.
        dropout_p: as in `attention`.
        seed: the `dropout_seed` of the call.
        lengths: int `[batch]`, how many queries and keys of each sequence there are; None for all.

    Returns:
        `[batch, heads, seqlen_q rounded up to 128s, seqlen_k rounded up to 128s]` in q's dtype.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).unflatten(2, (heads_kv, heads // heads_kv))
    scores = torch.einsum("bigrd,bjgd->bgrij", grouped, k.to(dtype)).flatten(1, 2)
    scale = options.get("scale")
    scores *= head_dim**-0.5 if scale is None else scale
    softcap = options.get("softcap")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seqlen_q, device=q.device)[:, None]
    j = torch.arange(seqlen_k, device=q.device)
    many_q, many_k = (n[:, None, None, None] for n in lengths) if lengths else (seqlen_q, seqlen_k)
    distance = j - (i + many_k - many_q)
    if options.get("alibi_slopes") is not None:
        scores = scores - options["alibi_slopes"].to(dtype)[..., None, None] * distance.abs()
    sees = (i < many_q) & (j < many_k)
    left, right = window_sides("", options.get("causal", False), options.get("window"))
    if left >= 0:
        sees = sees & (distance >= -left)
    if right >= 0:
        sees = sees & (distance <= right)
    scores = scores.masked_fill(~sees, -torch.inf)
    peak = scores.amax(-1, keepdim=True) if seqlen_k else scores.new_zeros(())
    weights = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp().to(q.dtype)
    if drop_count(dropout_p):
        keep = keep_mask(seed, dropout_p, (0, batch * heads), (0, seqlen_q), (0, seqlen_k))
        # What is dropped is negative even where it is too small for the dtype.
        numbers = torch.finfo(q.dtype)
        smallest = max(numbers.tiny * numbers.eps, 2.0**-120)
        dropped = sees & ~keep.view_as(weights)
        weights = torch.where(dropped, -weights.clamp(min=smallest), weights)
    return pad(weights, (0, -seqlen_k % _ROUNDED_TO, 0, -seqlen_q % _ROUNDED_TO))


def packed_softmax(
    q: Tensor,
    k: Tensor,
    packing: tuple[Tensor, Tensor, int, int],
    options: dict[str, Any],
    dropout_p: float,
    seed: Tensor,
) -> Tensor:
    """`dense_softmax` of packed sequences, each in the first rows and columns of its own matrix."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    dense_q = _unpacked(q, cu_seqlens_q, max_seqlen_q)
    dense_k = _unpacked(k, cu_seqlens_k, max_seqlen_k)
    lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    return dense_softmax(dense_q, dense_k, options, dropout_p, seed, lengths)


def _unpacked(rows: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """`[batch, longest, heads, head_dim]`, zeros after the end of a sequence."""
    places = torch.arange(longest, device=rows.device)
    index = cu_seqlens[:-1, None] + places
    ends = cu_seqlens[1:, None]
    if not rows.shape[0]:
        return rows.new_zeros(*index.shape, *rows.shape[1:])
    found = rows.detach()[index.clamp(max=rows.shape[0] - 1)]
    return found.masked_fill((index >= ends)[..., None, None], 0.0)
