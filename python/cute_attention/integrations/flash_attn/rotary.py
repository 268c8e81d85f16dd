"""apply_rotary_emb of flash-attn: rotary embeddings as `semantics/rotary.py` defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import on_device, tensors
from ...semantics.rotary import places_in, rotate


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
