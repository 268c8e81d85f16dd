"""Rotary embeddings: pairs of a head's first numbers, turned by an angle that depends on the place.

The arithmetic is float32 (float64 where x is), and the result is rounded once. With `c` and `s` the
row of cos and sin for the position of a token, a pair `(a, b)` becomes `(a c - b s, a s + b c)`.
Pairs are neighbours where interleaved, else number i and number `i + rotary_dim / 2`. What lies
beyond rotary_dim stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    name: str, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> Tensor:
    """x `[..., heads, head_dim]` turned by the angles of `positions [...]`.

    A position for which there is no angle raises where positions can be read; on a GPU, where
    reading them would wait for it, it takes the last.

    Args:
        name: the function that was called, for messages.
        x: queries or keys.
        cos: `[positions, rotary_dim / 2]`.
        sin: likewise.
        positions: integers.
        interleaved: which numbers are a pair.
    """
    last = cos.shape[0] - 1
    readable = positions.numel() and not positions.is_cuda and not torch.compiler.is_compiling()
    if readable and int(positions.max()) > last:
        raise ValueError(
            f"{name}: cos and sin (rotary_cos and rotary_sin) have {last + 1} positions, expected "
            f"at least {int(positions.max()) + 1}"
        )
    index = positions.clamp(0, max(last, 0))
    dtype = torch.promote_types(x.dtype, torch.float32)
    # [..., 1, rotary_dim / 2]
    cosine, sine = cos[index].to(dtype).unsqueeze(-2), sin[index].to(dtype).unsqueeze(-2)
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    if interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * cosine - second * sine, first * sine + second * cosine
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)


def places_in(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of each of `rows` packed rows the sequence and the place in it; rows after the last sequence
    count as the last one's."""
    row = torch.arange(rows, device=cu_seqlens.device)
    last = cu_seqlens.shape[0] - 2
    ends = cu_seqlens[1:].long()  # of row's dtype
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=last)
    return sequence, row - cu_seqlens[sequence]
