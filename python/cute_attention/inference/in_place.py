"""Calls whose cache the kernels read where it lies: which they are, and the op that runs them."""

from __future__ import annotations

from torch import Tensor

from ..cache_arguments import CacheArguments
from ..ops.cache import ATTEND_CACHE
from .latent import is_for_qv_kernel, with_qv

PAGE_ROWS = 16  # kPageRows of params.h: the size of pages is a multiple of it
VECTOR = 8  # elements that kernels load at a time


def obstacle(call: CacheArguments) -> str:
    """Why no kernel reads the cache of a call where it lies; "" where kernels do."""
    page_size = call.k_cache.shape[1]
    for head_dim in (call.q.shape[-1], call.v_cache.shape[-1]):
        if head_dim % VECTOR:
            return f"a head dim of {head_dim}, no multiple of {VECTOR}"
    if call.qv is not None and not is_for_qv_kernel(call):
        return "qv"
    if call.attention_chunk:
        return "attention_chunk"
    if call.block_table is not None and page_size % PAGE_ROWS:
        return f"pages of {page_size} tokens, no multiple of {PAGE_ROWS}"
    if call.block_table is not None and call.leftpad is not None:
        return "leftpad with pages"
    if call.k_cache.dtype != call.q.dtype:
        return f"a cache of {call.k_cache.dtype}"
    if not call.room or not call.k_cache.shape[0]:
        return "a cache without room"
    return ""


def attend_in_place(call: CacheArguments, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries `q` and a cache that holds `total` tokens of each sequence, for a
    call without an `obstacle`."""
    call = with_qv(call._replace(q=q))
    longest = min(call.max_seqlen_k or call.room, call.room)
    table = call.block_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    return ATTEND_CACHE(
        call.q, call.k_cache, call.v_cache, call.backend, call.scale, call.window_left,
        call.window_right, call.softcap, total.contiguous(), _contiguous(call.cu_seqlens_q),
        call.max_seqlen_q, longest, _contiguous(call.leftpad), _contiguous(call.cache_batch_idx),
        table, call.alibi_slopes, call.sink, call.qv,
    )  # fmt: skip


def _contiguous(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.contiguous()
