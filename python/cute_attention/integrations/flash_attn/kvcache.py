"""flash_attn_with_kvcache of flash-attn 2, and the checks of calls with a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import on_device, tensors, type_name
from .arguments import WindowSize, options_of, renamed
from .cache import CacheCall, attend_to_cache
from .pages import check_integers, check_table
from .rotary import check_angles


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of keys and values, to which new ones may be appended; no gradient.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`.
        k_cache: `[cached sequences, room, heads_kv, head_dim]`; with a `block_table` `[pages,
            page_size, heads_kv, head_dim]`, pages of any size.
        v_cache: likewise.
        k: new keys `[batch, seqlen_new, heads_kv, head_dim]`, which are written into k_cache from
            `cache_seqlens` on, and nowhere else.
        v: new values, likewise.
        rotary_cos: `[positions, rotary_dim / 2]`: turns k by the angles of `cache_seqlens + i`, and
            q likewise if `causal` or with a window, else all of q by that of `cache_seqlens`.
        rotary_sin: likewise.
        cache_seqlens: how many tokens of each sequence are in the cache, an int or int32 `[batch]`;
            None for all there is room for.
        cache_batch_idx: int32 `[batch]`: which cached sequence (or row of the table) is whose.
        cache_leftpad: int32 `[batch]`: the first token of each sequence, from which masks and ALiBi
            count.
        block_table: int32 `[batch, pages of a sequence]`.
        softmax_scale: as in `flash_attn_func`, like what follows.
        causal: see there.
        window_size: see there.
        softcap: see there.
        rotary_interleaved: pairs are neighbours; else number i and number `i + rotary_dim / 2`.
        alibi_slopes: see there.
        num_splits: a hint, which changes nothing here.
        return_softmax_lse: return `(out, softmax_lse)`.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]`, or with `return_softmax_lse` also `softmax_lse
        [batch, heads, seqlen_q]`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
        RuntimeError: `block_table` is too short, or holds no page where one is needed.
    """
    name = "flash_attn_with_kvcache"
    try:
        call = CacheCall(
            name=name,
            table_label="block_table",
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            lengths=-1 if cache_seqlens is None else cache_seqlens,
            options=options_of(
                name, softmax_scale, causal, window_size, softcap, alibi_slopes, False
            ),
            k=k,
            v=v,
            cos=rotary_cos,
            sin=rotary_sin,
            interleaved=rotary_interleaved,
            batch_idx=cache_batch_idx,
            leftpad=cache_leftpad,
            table=block_table,
        )
        out, lse = attend_to_cache(checked_call(call))
    except (TypeError, ValueError) as error:
        raise renamed(name, error, {"k": "k_cache", "v": "v_cache"}) from None
    return (out, lse) if return_softmax_lse else out


def checked_call(call: CacheCall) -> CacheCall:
    """A call whose tensors agree, with lengths where -1 stood for as many as there is room for."""
    name, q, k_cache = call.name, call.q, call.k_cache
    tensors(name, q=q, k_cache=k_cache, v_cache=call.v_cache)
    rank = 4 if call.cu_seqlens_q is None else 3
    for label, tensor, expected in (
        ("q", q, rank),
        ("k_cache", k_cache, 4),
        ("v_cache", call.v_cache, 4),
    ):
        if tensor.dim() != expected:
            raise ValueError(
                f"{name}: {label} has shape {list(tensor.shape)}, expected {expected} dimensions"
            )
        on_device(name, label, tensor, q.device)
    if call.v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"{name}: v_cache has shape {list(call.v_cache.shape)}, expected "
            f"{[*k_cache.shape[:3], '*']} (all but the head dim must match k_cache)"
        )
    if call.table is not None:
        check_table(name, call.table_label, call.table, q.device)
    for label, value in (
        ("cache_seqlens", call.lengths),
        ("rotary_seqlens", call.rotary_lengths),
        ("cache_batch_idx", call.batch_idx),
        ("cache_leftpad", call.leftpad),
    ):
        if value is not None and not isinstance(value, int):
            check_integers(name, label, value, call.batch, q.device)
    for label, value in (
        ("cu_seqlens_q", call.cu_seqlens_q),
        ("cu_seqlens_k_new", call.cu_seqlens_new),
    ):
        if value is not None:
            check_integers(name, label, value, call.batch + 1, q.device)
    _check_rows(call)
    _check_new(call)
    if isinstance(call.lengths, int) and call.lengths < 0:
        return call._replace(lengths=call.room)
    return call


def _check_rows(call: CacheCall) -> None:
    """There is a cached sequence, or a row of the table, for each sequence."""
    label, rows = (
        ("k_cache", call.k_cache) if call.table is None else (call.table_label, call.table)
    )
    if call.batch_idx is None:
        if rows.shape[0] < call.batch:
            raise ValueError(
                f"{call.name}: {label} has shape {list(rows.shape)}, expected at least "
                f"{call.batch} rows (the batch of q)"
            )
        return
    if call.batch_idx.is_cuda or torch.compiler.is_compiling():
        return
    if not all(0 <= row < rows.shape[0] for row in call.batch_idx.tolist()):
        raise ValueError(
            f"{call.name}: cache_batch_idx is {call.batch_idx.tolist()}, expected rows of {label} "
            f"from 0 to {rows.shape[0] - 1}"
        )


def _check_new(call: CacheCall) -> None:
    """k and v have the caches' dtypes and dimensions, and come with lengths; angles with k."""
    name = call.name
    for label, new, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        if new is None and call.k is None and call.v is None:
            continue
        if not isinstance(new, Tensor):
            raise TypeError(
                f"{name}: {label} is {type_name(new)}, expected a torch.Tensor (k and v come "
                "together)"
            )
        if new.dtype != cache.dtype:
            raise TypeError(
                f"{name}: {label} has dtype {new.dtype}, expected {cache.dtype} (that of "
                f"{label}_cache)"
            )
        on_device(name, label, new, cache.device)
        packed = call.cu_seqlens_new is not None
        rows = [call.k.shape[0]] if packed else [call.batch, call.k.shape[1]]  # type: ignore[union-attr]
        if list(new.shape) != [*rows, *cache.shape[2:]]:
            raise ValueError(
                f"{name}: {label} has shape {list(new.shape)}, expected {[*rows, *cache.shape[2:]]}"
            )
    if call.k is not None and isinstance(call.lengths, int) and call.lengths < 0:
        raise ValueError(f"{name}: cache_seqlens is None, expected the lengths to append k at")
    if call.cos is None and call.sin is None:
        return
    if call.k is None:
        raise ValueError(f"{name}: rotary_cos is given, expected k and v with it")
    check_angles(name, call.q, call.cos, call.sin, "rotary_")
