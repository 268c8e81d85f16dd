"""FP8 tensors as bfloat16 ones: no kernel here reads FP8, so they are widened first.

Every number of float8_e4m3fn is one of bfloat16. The scales are of whole heads, so those of q and k
multiply q, and that of v multiplies v, or of a cache the output; each product is rounded once, to
bfloat16, which is also the dtype of the output.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...checks import tensors
from ...semantics.fp8 import FP8
from ...semantics.rotary import places_in
from ..flash_attn.arguments import forward_only

_NO_GRADIENT = "flash_attn_interface: there is no gradient with FP8 tensors"


class Descales(NamedTuple):
    """What FP8 tensors are multiplied by: each float32 `[batch, heads_kv]`, or None for 1."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


def is_fp8(tensor: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of FP8."""
    return isinstance(tensor, Tensor) and tensor.dtype == FP8


def widened(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and qv in bfloat16, multiplied by their scales; as they are where q is not FP8.

    Args:
        name: the function that was called.
        q: `[batch, seqlen_q, heads, head_dim]`, or packed `[total_q, heads, head_dim]`.
        k: likewise, with `heads_kv`.
        v: likewise.
        qv: like q; it is multiplied by the scale of q alone, since v has its own.
        descales: the scales.
        cu_seqlens: int32 `[batch + 1]` of q and of k and v, where they are packed.

    Raises:
        TypeError: a scale that is no tensor, or tensors of which only some are FP8.
        ValueError: a scale of another shape, or one for tensors that are not FP8.
    """
    ends_q, ends_k = cu_seqlens
    check_scales(name, q, k, ends_q, descales)
    if not is_fp8(q):
        return q, k, v, qv
    for label, tensor in (("k", k), ("v", v), ("qv", q if qv is None else qv)):
        tensors(name, **{label: tensor})
        if not is_fp8(tensor):
            raise TypeError(f"{name}: {label} has dtype {tensor.dtype}, expected {FP8} (q's)")
    return (
        wide(q, product(descales.q, descales.k), ends_q),
        wide(k),
        wide(v, descales.v, ends_k),
        None if qv is None else wide(qv, descales.q, ends_q),
    )


def check_scales(
    name: str, q: object, k: object, cu_seqlens_q: Tensor | None, descales: Descales
) -> None:
    """There are scales for FP8 alone, of the sequences of q and of the heads of k."""
    for label, value in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if value is None:
            continue
        tensors(name, q=q, k=k, **{label: value})
        assert isinstance(q, Tensor)
        assert isinstance(k, Tensor)
        if not is_fp8(q):
            raise ValueError(
                f"{name}: {label} is given, expected None, since q is not {FP8} but {q.dtype}"
            )
        heads, heads_kv = q.shape[-2], k.shape[-2]
        shape = [q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, heads_kv]
        if list(value.shape) != shape or not heads_kv or heads % heads_kv:
            raise ValueError(
                f"{name}: {label} has shape {list(value.shape)}, expected {shape} ([batch, "
                f"heads_kv], where heads_kv divides the {heads} heads of q)"
            )


def product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Both scales in one."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def wide(tensor: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """`tensor` in bfloat16. Its heads are multiplied by those of `scale [batch, heads_kv]` to which
    they belong."""
    with torch.no_grad():
        if scale is None:
            result = tensor.to(torch.bfloat16)
        else:
            factor = scale.float().repeat_interleave(tensor.shape[-2] // scale.shape[1], 1)
            if cu_seqlens is None:
                factor = factor[:, None]  # [batch, 1, heads]
            else:
                factor = factor[places_in(cu_seqlens, tensor.shape[0])[0]]  # [total, heads]
            result = (tensor.float() * factor[..., None]).to(torch.bfloat16)
    return forward_only(_NO_GRADIENT, result, tensor)
