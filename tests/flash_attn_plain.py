"""Attention as flash-attn defines it, in plain PyTorch and float64: what tests of its names compare
with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Of float32 results against float64: a few roundings of sums of some tens of terms.
CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 2e-5}


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    chunk: int = 0,
    qv: Tensor | None = None,
    kept: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Output `[batch, seqlen_q, heads, dim]` and LSE `[batch, heads, seqlen_q]`; `kept` says which
    probabilities dropout keeps, which are multiplied by `factor`."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    if qv is not None:
        q, k = torch.cat((q, qv.double()), -1), torch.cat((k, v), -1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[..., None, None] * (place - j).abs()
    left, right = window
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= j < place - left
    if right >= 0:
        hidden |= j > place + right
    if chunk:
        hidden |= j // chunk != torch.div(place, chunk, rounding_mode="floor")
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1) if k.shape[1] else scores.sum(-1) - torch.inf
    probabilities = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    if kept is not None:
        probabilities = probabilities * kept * factor
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), lse


def sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    """The rows of each sequence."""
    ends = cu_seqlens.tolist()
    return (slice(*pair) for pair in pairwise(ends))


def plain_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`plain` of packed sequences: `[total_q, heads, dim]` and `[heads, total_q]`."""
    outs, lses = [], []
    slopes, qv = options.pop("slopes", None), options.pop("qv", None)
    for b, (rows, keys) in enumerate(zip(sequences(cu_q), sequences(cu_k), strict=True)):
        out, lse = plain(
            q[None, rows], k[None, keys], v[None, keys],
            slopes=None if slopes is None else slopes[b],
            qv=None if qv is None else qv[None, rows], **options,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x `[batch, seqlen, heads, dim]` turned by the angles of `positions [batch, seqlen]`, in
    float32, as complex numbers."""
    half = cos.shape[1]
    angle = torch.complex(cos.float(), sin.float())[positions][:, :, None]
    turned = x[..., : 2 * half].float()
    if interleaved:
        pairs = torch.view_as_complex(turned.unflatten(-1, (half, 2)).contiguous())
        result = torch.view_as_real(pairs * angle).flatten(-2)
    else:
        pairs = torch.complex(turned[..., :half].contiguous(), turned[..., half:].contiguous())
        result = torch.cat(((pairs * angle).real, (pairs * angle).imag), -1)
    return torch.cat((result.to(x.dtype), x[..., 2 * half :]), -1)


def cumulative(*lengths: int) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
