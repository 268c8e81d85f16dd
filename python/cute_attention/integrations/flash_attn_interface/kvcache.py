"""flash_attn_with_kvcache of FlashAttention-3."""

from __future__ import annotations

from torch import Tensor

from ..flash_attn.arguments import WindowSize, length, options_of, renamed
from ..flash_attn.kvcache import CACHE_LABELS, attend_to_cache
from .dense import check_chunk
from .fp8 import Descales, check_scales, is_fp8, product, wide


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of keys and values, to which new ones may be appended; no gradient.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`, or with `cu_seqlens_q` `[total_q, heads,
            head_dim]`.
        k_cache: `[cached sequences, room, heads_kv, head_dim]`; with a `page_table` `[pages,
            page_size, heads_kv, head_dim]`, pages of any size.
        v_cache: likewise, with v's head dim.
        k: new keys `[batch, seqlen_new, heads_kv, head_dim]`, or with `cu_seqlens_k_new`
            `[total_new, heads_kv, head_dim]`, which are written into k_cache from `cache_seqlens`
            on, and nowhere else.
        v: new values, likewise.
        qv: like q with v's head dim: qv·v joins q·k. On Hopper a kernel reads it where the two head
            dims have more than 256 columns together (64 and 512, of latent attention); else both
            are concatenated, which copies the cache.
        rotary_cos: `[positions, rotary_dim / 2]`: turns k by the angles of `cache_seqlens + i`, and
            q likewise if `causal` or with a window or chunks, else all of q by that of
            `cache_seqlens`.
        rotary_sin: likewise.
        cache_seqlens: how many tokens of each sequence are in the cache, an int or int32 `[batch]`;
            None for all there is room for.
        cache_batch_idx: int32 `[batch]`: which cached sequence (or row of the table) is whose.
        cache_leftpad: int32 `[batch]`: the first token of each sequence, from which masks count.
        page_table: int32 `[cached sequences, pages of a sequence]`.
        cu_seqlens_q: int32 `[batch + 1]`: 0, and then the row at which each sequence of q ends.
        cu_seqlens_k_new: likewise for k and v.
        max_seqlen_q: the length of the longest sequence of q, with `cu_seqlens_q`.
        rotary_seqlens: int32 `[batch]`, in the place of `cache_seqlens` for angles, where there are
            any.
        q_descale: with FP8 tensors float32 `[batch, heads_kv]`, by which q is multiplied; None for
            1. q, k, v and a copy of the cache become bfloat16.
        k_descale: likewise for the keys.
        v_descale: likewise for the values.
        softmax_scale: as in `flash_attn_func`, like what follows.
        causal: see there.
        window_size: see there.
        attention_chunk: see there, counted from the first token of each sequence.
        softcap: see there.
        rotary_interleaved: pairs are neighbours; else number i and number `i + rotary_dim / 2`.
        scheduler_metadata: a hint, which changes nothing here.
        num_splits: a hint: into how many parts a kernel divides the keys.
        pack_gqa: a hint, which changes nothing here.
        sm_margin: likewise.
        return_softmax_lse: return `(out, softmax_lse)`.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]`, or with `return_softmax_lse` also `softmax_lse
        [batch, heads, seqlen_q]`; packed `[total_q, heads, head_dim_v]` and `[heads, total_q]`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
        RuntimeError: `page_table` is too short, or holds no page where one is needed.
    """
    name = "flash_attn_with_kvcache"
    try:
        if not (q_descale is k_descale is v_descale is None):
            descales = Descales(q_descale, k_descale, v_descale)
            check_scales(name, q, k_cache, cu_seqlens_q, descales)
        if is_fp8(q):
            of_q = product(q_descale, k_descale), product(q_descale, v_descale)
            q = wide(q, of_q[0], cu_seqlens_q)
            qv = None if qv is None else wide(qv, of_q[1], cu_seqlens_q)
            k, v, rotary_cos, rotary_sin = (
                wide(given) if is_fp8(given) else given for given in (k, v, rotary_cos, rotary_sin)
            )
        check_chunk(name, attention_chunk)
        options = options_of(name, softmax_scale, causal, window_size, softcap, None, False)
        if max_seqlen_q is not None:
            max_seqlen_q = length(name, "max_seqlen_q", max_seqlen_q)
        results = attend_to_cache(
            (q, k_cache, v_cache, cache_seqlens),
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            rotary_seqlens=None if rotary_cos is None else rotary_seqlens,
            cache_batch_idx=cache_batch_idx,
            leftpad=cache_leftpad,
            block_table=page_table,
            qv=qv,
            attention_chunk=attention_chunk,
            num_splits=num_splits,
            return_lse=bool(return_softmax_lse),
            **options,
        )
    except (TypeError, ValueError) as error:
        labels = {**CACHE_LABELS, "block_table": "page_table"}
        raise renamed(name, error, labels) from None
    if v_descale is None:
        return results
    if return_softmax_lse:
        return wide(results[0], v_descale, cu_seqlens_q), results[1]
    return wide(results, v_descale, cu_seqlens_q)
