"""flash_attn_varlen_func and its packed relatives, for sequences that lie one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arguments import WindowSize, forward_only, length, options_of, renamed
from .attend import Packing, Results, attend
from .packed_tensors import parts_of
from .paged import attend_pages


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Attention over packed sequences, with the arguments and results of flash-attn.

    Args:
        q: queries `[total_q, heads, head_dim]`.
        k: keys `[total_k, heads_kv, head_dim]`; with a `block_table` `[pages, page_size, heads_kv,
            head_dim]`.
        v: values, likewise.
        cu_seqlens_q: int32 `[batch + 1]`: 0, and then the row at which each sequence ends.
        cu_seqlens_k: likewise for k and v; with a `block_table` it says how many keys each sequence
            has.
        max_seqlen_q: the length of the longest sequence of q, or any larger int.
        max_seqlen_k: likewise for k and v.
        dropout_p: as in `flash_attn_func`, like what follows.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.
        block_table: int32 `[batch, pages of a sequence]`: which pages hold its keys. A kernel reads
            them where they lie, or a copy where a page has no multiple of 16 keys; there is no
            gradient.

    Returns:
        `out [total_q, heads, head_dim_v]`, or with `return_attn_probs` also `softmax_lse [heads,
        total_q]` and `S_dmask`, whose lengths are `max_seqlen_q` and `max_seqlen_k` up to 128s.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
        RuntimeError: `block_table` has no room for `max_seqlen_k` keys.
    """
    name = "flash_attn_varlen_func"
    try:
        options = options_of(
            name, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if block_table is None:
            return attend(name, q, k, v, packing, dropout_p, options, return_attn_probs)
        if dropout_p:
            raise ValueError(f"{name}: dropout_p is {dropout_p}, expected 0 with a block_table")
        out, lse = attend_pages(name, q, k, v, packing, block_table, options)
        out = forward_only(f"{name}: there is no gradient with a block_table", out, q, k, v)
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: queries `[total_q, heads, head_dim]`.
        kv: `[total_k, 2, heads_kv, head_dim]`.
        cu_seqlens_q: as in `flash_attn_varlen_func`, like all that follows.
        cu_seqlens_k: see there.
        max_seqlen_q: see there.
        max_seqlen_k: see there.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        What `flash_attn_varlen_func` does.
    """
    name = "flash_attn_varlen_kvpacked_func"
    try:
        options = options_of(
            name, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        k, v = parts_of(name, "kv", kv, 2, "[total_k, 2, heads_kv, head_dim]")
        packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend(name, q, k, v, packing, dropout_p, options, return_attn_probs)
    except (TypeError, ValueError) as error:
        raise renamed(name, error, {"k": "kv", "v": "kv"}) from None


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: `[total, 3, heads, head_dim]`.
        cu_seqlens: int32 `[batch + 1]`, as `cu_seqlens_q` in `flash_attn_varlen_func`.
        max_seqlen: the length of the longest sequence, or any larger int.
        dropout_p: as in `flash_attn_func`, like all that follows.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        What `flash_attn_varlen_func` does.
    """
    name = "flash_attn_varlen_qkvpacked_func"
    try:
        options = options_of(
            name, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        q, k, v = parts_of(name, "qkv", qkv, 3, "[total, 3, heads, head_dim]")
        longest = length(name, "max_seqlen", max_seqlen)
        packing = cu_seqlens, cu_seqlens, longest, longest
        return attend(name, q, k, v, packing, dropout_p, options, return_attn_probs)
    except (TypeError, ValueError) as error:
        raise renamed(name, error, _QKV_LABELS) from None


_QKV_LABELS = {
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"),
}


def packing_of(
    name: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any
) -> Packing:
    """These four, the lengths as ints."""
    longest_q = length(name, "max_seqlen_q", max_seqlen_q)
    return cu_seqlens_q, cu_seqlens_k, longest_q, length(name, "max_seqlen_k", max_seqlen_k)
