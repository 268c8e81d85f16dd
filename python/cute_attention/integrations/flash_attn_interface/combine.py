"""flash_attn_combine: one result from those of parts of the keys; and the hint of a schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import tensors
from ...inference.merge import merge_attention
from ..flash_attn.arguments import WindowSize


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and LSE of attention to all keys, from those of parts of the keys.

    Args:
        out_partial: float32 `[splits, batch, seqlen, heads, head_dim]`, or `[splits, total, heads,
            head_dim]`; what a part without keys holds is not read where its LSE is -inf.
        lse_partial: float32 `[splits, batch, seqlen, heads]`, or `[splits, total, heads]`.
        out: where to write the output.
        out_dtype: the output's dtype, without `out`; out_partial's where None.

    Returns:
        `out [batch, seqlen, heads, head_dim]` and `lse [batch, seqlen, heads]`, float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not agree.
    """
    name = "flash_attn_combine"
    given = {"out_partial": out_partial, "lse_partial": lse_partial}
    tensors(name, **given, **({} if out is None else {"out": out}))
    for label, tensor in given.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: {label} has dtype {tensor.dtype}, expected torch.float32")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"{name}: out_dtype is {out_dtype!r}, expected a torch.dtype or None")
    if out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"{name}: lse_partial has shape {list(lse_partial.shape)}, expected "
            f"{list(out_partial.shape[:-1])} (out_partial's without head_dim)"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(
            f"{name}: out has shape {list(out.shape)}, expected {list(out_partial.shape[1:])}"
        )
    lses = lse_partial.float().transpose(-1, -2)
    whole, lse = merge_attention(out_partial.float(), lses)
    lse = lse.transpose(-1, -2).contiguous()
    if out is None:
        return whole.to(out_partial.dtype if out_dtype is None else out_dtype), lse
    return out.copy_(whole), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on cache_seqlens' device: kernels here plan their work themselves, and
    `flash_attn_with_kvcache` takes any such hint."""
    tensors("get_scheduler_metadata", cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
