"""flash_attn_with_kvcache of flash-attn 2, and what that of FlashAttention-3 shares with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache_arguments import CacheArguments
from ...inference.api import attention_with_cache
from ...inference.in_place import obstacle
from ...inference.options import DEFAULTS
from .arguments import WindowSize, options_of, renamed
from .pages import int32


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
        num_splits: a hint: into how many parts a kernel divides the keys.
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
        options = options_of(name, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
        return attend_to_cache(
            (q, k_cache, v_cache, cache_seqlens),
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            cache_batch_idx=cache_batch_idx,
            leftpad=cache_leftpad,
            block_table=block_table,
            num_splits=num_splits,
            return_lse=bool(return_softmax_lse),
            **options,
        )
    except (TypeError, ValueError) as error:
        raise renamed(name, error, CACHE_LABELS) from None


# What arguments of `attention_with_cache` are called by flash-attn.
CACHE_LABELS = {"leftpad": "cache_leftpad", "return_lse": "return_softmax_lse"}


def attend_to_cache(call: tuple[Any, Any, Any, Any], **options: Any) -> Any:
    """`attention_with_cache` without gradients, with integers of 64 bits too, and with the length
    of the longest sequence where the host has it or reads it.

    It reads lengths on a GPU for one purpose: with a table, outside of a CUDA graph, they decide
    how many pages are copied for a call whose pages no kernel reads where they lie.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return attend_to_cache(call, **options)
    q, k_cache, v_cache, lengths = call
    # A call with fewer options takes less time.
    options = {name: int32(value) for name, value in options.items() if value is not DEFAULTS[name]}
    lengths = int32(lengths)
    longest = _longest((q, k_cache, v_cache, lengths), options)
    if longest is not None:
        options["max_seqlen_k"] = longest
    return attention_with_cache(q, k_cache, v_cache, lengths, **options)


def _longest(call: tuple[Any, Any, Any, Any], options: dict[str, Any]) -> int | None:
    """The length of the longest sequence with its new tokens, at least; None where nobody says."""
    lengths = call[3]
    k, packed = options.get("k"), options.get("cu_seqlens_k_new") is not None
    new = k.shape[0 if packed else 1] if isinstance(k, Tensor) and k.dim() > 1 else 0
    if isinstance(lengths, int):
        return lengths + new if lengths >= 0 else None
    if (
        not _copies_pages(call, options)
        or not lengths.is_cuda
        or not lengths.numel()
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    return int(lengths.max()) + new


def _copies_pages(call: tuple[Any, Any, Any, Any], options: dict[str, Any]) -> bool:
    """Whether a kernel would get a copy of the pages of a table. What is no such call is refused
    later."""
    table = options.get("block_table")
    if table is None:
        return False
    tensors = (*call, table)
    ranks = [tensor.dim() if isinstance(tensor, Tensor) else None for tensor in tensors]
    if ranks[0] not in (3, 4) or ranks[1:] != [4, 4, 1, 2]:
        return False
    given = {
        name: options[name] for name in ("leftpad", "qv", "attention_chunk") if name in options
    }
    return bool(obstacle(CacheArguments(*call, "auto", 1.0, block_table=table, **given)))
