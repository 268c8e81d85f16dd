"""flash_attn_varlen_func of FlashAttention-3, for packed sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...api import attention_varlen
from ...checks import tensors
from ...inference.spans import Spans, attend_spans, spans_of
from ..flash_attn.arguments import WindowSize, options_of, renamed
from ..flash_attn.attend import Packing
from ..flash_attn.pages import check_integers
from ..flash_attn.varlen import packing_of
from .dense import Results, check_chunk, joined
from .fp8 import Descales, widened


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention over packed sequences, with the arguments and results of FlashAttention-3.

    Args:
        q: queries `[total_q, heads, head_dim]`.
        k: keys `[total_k, heads_kv, head_dim]`.
        v: values `[total_k, heads_kv, head_dim_v]`.
        cu_seqlens_q: int32 `[batch + 1]`: 0, and then the row at which each sequence ends.
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: the length of the longest sequence of q, or any larger int.
        max_seqlen_k: likewise for k and v.
        seqused_q: int32 `[batch]`: how many rows of each sequence are used. The others are not
            read; their output is 0.
        seqused_k: likewise for k and v.
        softmax_scale: as in `flash_attn_func`, like what follows.
        causal: see there.
        qv: `[total_q, heads, head_dim_v]`, see there.
        q_descale: see there.
        k_descale: see there.
        v_descale: see there.
        window_size: see there.
        attention_chunk: see there, counted from the start of each sequence.
        softcap: see there.
        num_splits: see there.
        pack_gqa: see there.
        deterministic: see there.
        sm_margin: see there.
        return_attn_probs: see there.

    Returns:
        `out [total_q, heads, head_dim_v]`, or with `return_attn_probs` also `softmax_lse [heads,
        total_q]`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
    """
    name = "flash_attn_varlen_func"
    try:
        options = options_of(name, softmax_scale, causal, window_size, softcap, None, deterministic)
        packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        descales = Descales(q_descale, k_descale, v_descale)
        q, k, v, qv = widened(name, q, k, v, qv, descales, packing[:2])
        q, k = joined(name, q, k, v, qv)
        if seqused_q is None and seqused_k is None and not attention_chunk:
            if not return_attn_probs:
                return attention_varlen(q, k, v, *packing, **options)
            return attention_varlen(q, k, v, *packing, return_lse=True, **options)
        used = seqused_q, seqused_k
        out, lse = attend_used(name, q, k, v, packing, used, attention_chunk, options)
        return (out, lse) if return_attn_probs else out
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def attend_used(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    used: tuple[Tensor | None, Tensor | None],
    chunk: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the used rows of each sequence, in chunks of keys where there are any."""
    check_chunk(name, chunk)
    tensors(name, q=q, k=k, v=v)
    queries, keys = used_spans(name, q, packing, used)
    return attend_spans(q, k, v, queries, keys, options, chunk)


def used_spans(
    name: str, q: Tensor, packing: Packing, used: tuple[Tensor | None, Tensor | None]
) -> tuple[Spans, Spans]:
    """Where the used rows of each sequence lie, in q and in k and v."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    tensors(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    batch = cu_seqlens_q.shape[0] - 1
    check_integers(name, "cu_seqlens_q", cu_seqlens_q, batch + 1, q.device)
    check_integers(name, "cu_seqlens_k", cu_seqlens_k, batch + 1, q.device)
    for label, value in zip(("seqused_q", "seqused_k"), used, strict=True):
        if value is not None:
            check_integers(name, label, value, batch, q.device)
    queries = spans_of(cu_seqlens_q, max_seqlen_q, used[0])
    return queries, spans_of(cu_seqlens_k, max_seqlen_k, used[1])
