"""Rotary embeddings: pairs of a head's first numbers, turned by an angle that depends on the place.

The arithmetic is float32 (float64 where x is), and the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import on_device, tensors


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x with the first `rotary_dim` numbers of each head turned; differentiable in x.

    Args:
        x: `[batch, seqlen, heads, head_dim]`, or with `cu_seqlens` `[total, heads, head_dim]`.
        cos: `[positions, rotary_dim / 2]`.
        sin: likewise.
        interleaved: pairs are neighbours; else number i and number `i + rotary_dim / 2`.
        inplace: write the result into x.
        seqlen_offsets: the position of each sequence's first token, an int or `[batch]`.
        cu_seqlens: int32 `[batch + 1]`, of packed sequences.
        max_seqlen: not needed here.

    Raises:
        ValueError: shapes that do not agree, or a position for which there is no row of cos.
    """
    check_angles("apply_rotary_emb", x, cos, sin)
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        place = torch.arange(seqlen, device=x.device).expand(batch, seqlen)
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    else:
        sequence, place = places_in(cu_seqlens, x.shape[0])
        many = isinstance(seqlen_offsets, Tensor)
        offsets = seqlen_offsets[sequence] if many else seqlen_offsets  # type: ignore[index]
    rotated = rotate("apply_rotary_emb", x, cos, sin, place + offsets, interleaved)
    return x.copy_(rotated) if inplace else rotated


def check_angles(name: str, x: Tensor, cos: object, sin: object, prefix: str = "") -> None:
    """cos and sin are `[positions, rotary_dim / 2]`, on x's device; rotary_dim fits into a head.

    `prefix` is what their names begin with for the caller.
    """
    tensors(name, **{f"{prefix}cos": cos, f"{prefix}sin": sin})
    assert isinstance(cos, Tensor)
    assert isinstance(sin, Tensor)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{name}: {prefix}cos and {prefix}sin have shapes {list(cos.shape)} and "
            f"{list(sin.shape)}, expected [positions, rotary_dim / 2] for both, rotary_dim at most "
            f"{x.shape[-1]} (head_dim)"
        )
    on_device(name, f"{prefix}cos", cos, x.device)
    on_device(name, f"{prefix}sin", sin, x.device)


def places_in(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of each of `rows` packed rows the sequence and the place in it; rows after the last sequence
    count as the last one's."""
    row = torch.arange(rows, device=cu_seqlens.device)
    last = cu_seqlens.shape[0] - 2
    ends = cu_seqlens[1:].long()  # of row's dtype
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=last)
    return sequence, row - cu_seqlens[sequence]


def rotate(
    name: str, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> Tensor:
    """x `[..., heads, head_dim]` turned by the angles of `positions [...]`.

    A position for which there is no angle raises where positions can be read; on a GPU, where
    reading them would wait for it, it takes the last.
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
        first, second = turned.split(half, -1)
    pair = first * cosine - second * sine, first * sine + second * cosine
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)
