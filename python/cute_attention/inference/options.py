"""The options of `attention_with_cache`: its keyword arguments, with types, meanings, defaults."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ..options import Window


class CacheOptions(TypedDict, total=False):
    """What `attention_with_cache` and `explain_with_cache` take by keyword.

    Args:
        k: new keys `[batch, seqlen_new, heads_kv, head_dim]`, which are written into `k_cache` from
            `cache_seqlens` on, bit by bit unless they are rotated, and nowhere else. Packed queries
            come with packed keys `[total_new, heads_kv, head_dim]`.
        v: new values `[batch, seqlen_new, heads_kv, head_dim_v]`, likewise.
        block_table: int32 `[batch, pages of a sequence]`: token `t` of sequence `b` lies in page
            `block_table[b, t // page_size]`, at `t % page_size`. Pages may come in any order and
            be shared. Entries of pages that a sequence does not need are not read.
        cache_batch_idx: int32 `[batch]`: which row of the cache, or of the table, is whose.
        leftpad: int32 `[batch]`: the first token of each sequence, from which masks and ALiBi
            count. Tokens before it are not read.
        cu_seqlens_q: int32 `[batch + 1]`, as in `attention_varlen`, for queries that are packed:
            sequences of any lengths, so that prefill and decoding mix in one call.
        max_seqlen_q: the length of the longest sequence of packed queries, or any larger int; None
            for the number of all rows.
        cu_seqlens_k_new: int32 `[batch + 1]`, likewise for packed k and v; `cu_seqlens_q` where
            None.
        max_seqlen_k: at least the length of the longest sequence with its new tokens, where the
            host knows one; None for all there is room for. It decides about speed alone.
        rotary_cos: `[positions, rotary_dim / 2]`, with k: turns the first rotary_dim numbers of k
            by the angles of `cache_seqlens + i`, in float32. With a causal mask, a window or
            chunks q is turned likewise, else all of q by the angle of `cache_seqlens`. k is written
            as it was turned.
        rotary_sin: likewise.
        rotary_interleaved: pairs are neighbours; else number i and number `i + rotary_dim / 2`.
        rotary_seqlens: int32 `[batch]`, in the place of `cache_seqlens` for angles.
        causal: the last query sees every key, and each query before it one key less.
        window: `(left, right)`, in keys, as in `attention`: counted from the end too.
        attention_chunk: a query sees keys of its own chunk of so many tokens only, counted from
            the start of the sequence; 0 for no chunks.
        scale: multiplies q·k; `head_dim ** -0.5` where None, with qv `(head_dim + head_dim_v) **
            -0.5`.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None or 0 for no cap.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`, as in `attention`.
        sink: float32 `[heads]`: a logit that joins the denominator of the softmax only.
        qv: like q with v's head dim: qv·v joins q·k.
        num_splits: into how many parts a kernel that reads the cache where it lies divides the
            keys, at most 128; 0 for what it finds best. The reference backend divides none.
        batch_invariant: ask for outputs whose bits do not depend on the other sequences of the
            batch, nor on the chunks in which a causal prompt came. Keys are not divided then,
            whatever num_splits is.
        return_lse: return `(out, lse)`.
        backend: as in `attention`.
    """

    k: Tensor | None
    v: Tensor | None
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_k: int | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    causal: bool
    window: Window | None
    attention_chunk: int
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    qv: Tensor | None
    num_splits: int
    batch_invariant: bool
    backend: str


class AllCacheOptions(CacheOptions, total=False):
    """`CacheOptions`, and the one that decides what is returned."""

    return_lse: bool


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(name for name in CacheOptions.__annotations__ if name != "backend"),
    "rotary_interleaved": True,
    "causal": False,
    "attention_chunk": 0,
    "num_splits": 0,
    "batch_invariant": False,
    "return_lse": False,
    "backend": "auto",
}

# What other libraries call them.
_ELSEWHERE = {
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window, where None and not -1 is unbounded",
    "page_table": "block_table",
    "block_tables": "block_table",
    "cache_leftpad": "leftpad",
    "logits_soft_cap": "softcap",
    "sinks": "sink",
    "s_aux": "sink",
    "return_softmax_lse": "return_lse",
}


def with_defaults(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """All options of a call of the function `name`.

    Raises:
        TypeError: an option that there is not.
    """
    for option in options:
        if option not in DEFAULTS:
            there = _ELSEWHERE.get(option)
            what = f"pass {there}" if there else f"see help(cute_attention.inference.{name})"
            raise TypeError(f"{name}: there is no option {option}, {what}")
    return {**DEFAULTS, **options}
