"""flash_attn_func of FlashAttention-3, for sequences of one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import attention
from ...checks import tensors
from ...inference.spans import attend_spans, equal_spans
from ..flash_attn.arguments import WindowSize, options_of, renamed
from .fp8 import Descales, is_fp8, widened

Results = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Attention, with the arguments and results of FlashAttention-3.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`.
        k: keys `[batch, seqlen_k, heads_kv, head_dim]`; `heads_kv` divides `heads`.
        v: values `[batch, seqlen_k, heads_kv, head_dim_v]`.
        softmax_scale: multiplies q·k; `head_dim ** -0.5` where None, with qv `(head_dim +
            head_dim_v) ** -0.5`.
        causal: query `i` sees keys `j <= i + seqlen_k - seqlen_q`.
        qv: `[batch, seqlen_q, heads, head_dim_v]`: qv·v joins q·k. Both are concatenated, which
            copies q, k and v.
        q_descale: with FP8 tensors float32 `[batch, heads_kv]`, by which q is multiplied; None for
            1. q, k and v of float8_e4m3fn are copied as bfloat16, and have no gradient.
        k_descale: likewise for k.
        v_descale: likewise for v.
        window_size: `(left, right)`, in keys; a negative side is unbounded. With `causal`, the
            right side is 0.
        attention_chunk: query `i` sees keys of its own chunk of so many only: those `j` with the
            same `j // attention_chunk` as `i + seqlen_k - seqlen_q`; 0 for all.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; 0 for no cap.
        num_splits: a hint, which changes nothing here.
        pack_gqa: likewise.
        deterministic: ask for a backward that is bitwise repeatable.
        sm_margin: a hint, which changes nothing here.
        return_attn_probs: return `(out, softmax_lse)`.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]`, or with `return_attn_probs` also `softmax_lse
        [batch, heads, seqlen_q]`, float32, the natural logarithm of the softmax's denominator. A
        row that sees no key has output 0 and an LSE of -inf.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
    """
    name = "flash_attn_func"
    try:
        options = options_of(name, softmax_scale, causal, window_size, softcap, None, deterministic)
        scaled = q_descale is not None or k_descale is not None or v_descale is not None
        if scaled or is_fp8(q):
            q, k, v, qv = widened(name, q, k, v, qv, Descales(q_descale, k_descale, v_descale))
        if qv is None and not attention_chunk:
            if not return_attn_probs:
                return attention(q, k, v, **options)
            return attention(q, k, v, return_lse=True, **options)
        q, k = joined(name, q, k, v, qv)
        results = attend_in_chunks(name, q, k, v, attention_chunk, options)
        return results if return_attn_probs else results[0]
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`, or `[batch, seqlen, num_heads_q + 2 * heads_kv,
            head_dim]`.
        softmax_scale: as in `flash_attn_func`, like what follows.
        causal: see there.
        q_descale: see there.
        k_descale: see there.
        v_descale: see there.
        window_size: see there.
        attention_chunk: see there.
        softcap: see there.
        deterministic: see there.
        num_heads_q: the number of query heads, where qkv has four dimensions.
        sm_margin: see there.
        return_attn_probs: see there.

    Returns:
        What `flash_attn_func` does.
    """
    name = "flash_attn_qkvpacked_func"
    try:
        tensors(name, qkv=qkv)
        options = options_of(name, softmax_scale, causal, window_size, softcap, None, deterministic)
        q, k, v = _parts(name, qkv, num_heads_q)
        q, k, v, _ = widened(name, q, k, v, None, Descales(q_descale, k_descale, v_descale))
        results = attend_in_chunks(name, q, k, v, attention_chunk, options)
        return results if return_attn_probs else results[0]
    except (TypeError, ValueError) as error:
        raise renamed(name, error, {"q": "qkv", "k": "qkv", "v": "qkv"}) from None


def _parts(name: str, qkv: Tensor, heads: int | None) -> tuple[Tensor, ...]:
    """q, k and v, as views."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv.unbind(2)
    if qkv.dim() == 4 and heads is not None and qkv.shape[2] >= heads:
        others = qkv.shape[2] - heads
        if others % 2 == 0:
            return qkv.split([heads, others // 2, others // 2], 2)
    raise ValueError(
        f"{name}: qkv has shape {list(qkv.shape)} and num_heads_q is {heads}, expected [batch, "
        "seqlen, 3, heads, head_dim], or [batch, seqlen, num_heads_q + 2 * heads_kv, head_dim]"
    )


def joined(name: str, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k, with qv and v beside them where qv·v joins the scores: [q, qv]·[k, v]."""
    if qv is None:
        return q, k
    tensors(name, q=q, k=k, v=v, qv=qv)
    if qv.dtype != q.dtype:
        raise TypeError(f"{name}: qv has dtype {qv.dtype}, expected {q.dtype} (the dtype of q)")
    if qv.shape != (*q.shape[:-1], v.shape[-1]) or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{name}: qv has shape {list(qv.shape)}, expected {[*q.shape[:-1], v.shape[-1]]} (q's "
            "with the head dim of v)"
        )
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def check_chunk(name: str, attention_chunk: object) -> None:
    """An int, 0 or more."""
    if not isinstance(attention_chunk, int) or isinstance(attention_chunk, bool):
        raise TypeError(f"{name}: attention_chunk is {attention_chunk!r}, expected an int")
    if attention_chunk < 0:
        raise ValueError(f"{name}: attention_chunk is {attention_chunk}, expected an int >= 0")


def attend_in_chunks(
    name: str, q: Tensor, k: Tensor, v: Tensor, chunk: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and LSE; each query sees keys of its own chunk only. The chunks are packed sequences
    of the same tensors, so nothing is computed that no query sees."""
    check_chunk(name, chunk)
    if not chunk:
        return attention(q, k, v, return_lse=True, **options)
    tensors(name, q=q, k=k, v=v)
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name}: {label} has shape {list(tensor.shape)}, expected [{q.shape[0]}, seqlen, "
                "heads, head_dim]"
            )
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    queries = equal_spans(batch, seqlen_q, q.device)
    keys = equal_spans(batch, seqlen_k, q.device)
    blind = max(0, seqlen_q - seqlen_k)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out, lse = attend_spans(q, k, v, queries, keys, options, chunk, blind)
    shape = batch, seqlen_q
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()
