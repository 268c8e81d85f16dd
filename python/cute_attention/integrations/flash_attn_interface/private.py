"""_flash_attn_forward and _flash_attn_backward of FlashAttention-3, which other libraries call.

Their parameters' names, order and defaults are upstream's; libraries read them with `inspect`, so
no decorator hides them. None of the outputs has a gradient of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import attention_varlen
from ...checks import tensors
from ...inference.spans import packing_of_spans
from ..flash_attn.arguments import is_set, options_of, renamed, sides_of
from ..flash_attn.gradients import gradients, row_sums
from ..flash_attn.varlen import packing_of
from .dense import attend_in_chunks, joined
from .fp8 import Descales, widened
from .kvcache import flash_attn_with_kvcache
from .varlen import attend_used, used_spans


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, LSE and two empty tensors, where upstream has the results of the splits. With packed
    keys it is `flash_attn_varlen_func`, with dense ones of one length `flash_attn_func`, else
    `flash_attn_with_kvcache`."""
    name = "_flash_attn_forward"
    sides = sides_of(name, window_size_left, window_size_right)
    with torch.no_grad():
        try:
            tensors(name, q=q, k=k, v=v)
            descales = Descales(q_descale, k_descale, v_descale)
            options = options_of(name, softmax_scale, causal, sides, softcap, None, False)
            cached = k_new, seqused_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, cu_seqlens_q
            if cu_seqlens_q is not None and cu_seqlens_k is not None:
                packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
                q, k, v, qv = widened(name, q, k, v, qv, descales, packing[:2])
                q, k = joined(name, q, k, v, qv)
                used = seqused_q, seqused_k
                if attention_chunk or used != (None, None):
                    out, lse = attend_used(name, q, k, v, packing, used, attention_chunk, options)
                else:
                    out, lse = attention_varlen(q, k, v, *packing, return_lse=True, **options)
            elif all(part is None for part in cached):
                q, k, v, qv = widened(name, q, k, v, qv, descales)
                q, k = joined(name, q, k, v, qv)
                out, lse = attend_in_chunks(name, q, k, v, attention_chunk, options)
            else:
                out, lse = flash_attn_with_kvcache(
                    q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx,
                    leftpad_k, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q,
                    seqlens_rotary, *descales, softmax_scale, causal, sides,
                    attention_chunk, softcap, rotary_interleaved, return_softmax_lse=True,
                )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise renamed(name, error) from None
    if out_ is not None:
        out = out_.copy_(out)
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients into dq, dk and dv, and returns the sums of dout * out over each row,
    float32 `[batch, heads, seqlen_q]`, packed `[heads, total_q]`. Gradients of rows that `sequed_q`
    and `sequed_k` leave out are 0."""
    name = "_flash_attn_backward"
    sides = sides_of(name, window_size_left, window_size_right)
    causal = is_set(name, "is_causal", is_causal)
    with torch.no_grad():
        try:
            options = options_of(name, softmax_scale, causal, sides, softcap, None, deterministic)
            packing: tuple[Any, ...] = ()
            if cu_seqlens_q is not None and cu_seqlens_k is not None:
                packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
                if sequed_q is not None or sequed_k is not None:
                    tensors(name, q=q)
                    spans = used_spans(name, q, packing, (sequed_q, sequed_k))
                    packing = packing_of_spans(*spans)[:4]
            elif sequed_q is not None or sequed_k is not None:
                raise ValueError(f"{name}: sequed_q or sequed_k is given, expected cu_seqlens_q")
            grads = gradients(q, k, v, packing, dout, out, softmax_lse, options)
        except (TypeError, ValueError) as error:
            raise renamed(name, error) from None
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            if target is not None:
                target.copy_(grad)
        return row_sums(dout, out)
