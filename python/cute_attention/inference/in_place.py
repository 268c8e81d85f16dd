"""Calls whose cache the kernels read where it lies: which they are, and the op that runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..ops.cache import ATTEND_CACHE, OPTIONAL, brief_options
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


def appends(call: CacheArguments) -> bool:
    """Whether a kernel appends what a call without an `obstacle` brings: where it can write the
    caches 16 bytes at a time, and no part of the queries is elsewhere."""
    if call.k is None or with_qv(call).qv is not None:
        return False
    return all(
        cache.data_ptr() % (2 * VECTOR) == 0
        and cache.stride(-1) == 1
        and not any(stride % VECTOR for stride in cache.stride()[:-1])
        for cache in (call.k_cache, call.v_cache)
    )


def attend_in_place(
    call: CacheArguments, q: Tensor, lengths: Tensor, *, appending: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries `q` and a cache that holds `lengths` tokens of each sequence, for a
    call without an `obstacle`. `appending`: those of the call are turned and appended first."""
    call = with_qv(call._replace(q=q, cache_seqlens=lengths.contiguous()))
    tensors = call.q, call.k_cache, call.v_cache, call.cache_seqlens
    return ATTEND_CACHE.forward(
        *tensors, brief_options(call), *optional_arguments(call, appending).values()
    )


def optional_arguments(call: CacheArguments, appending: bool) -> dict[str, Any]:
    """Those of the op `attend_cache` by name, as in `attend_in_place`, for a call of the form
    `with_qv`."""
    table = call.block_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    arguments: dict[str, Any] = dict.fromkeys(OPTIONAL)
    arguments.update(
        block_table=table,
        cu_seqlens_q=_contiguous(call.cu_seqlens_q),
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        cache_batch_idx=_contiguous(call.cache_batch_idx),
        leftpad=_contiguous(call.leftpad),
        alibi_slopes=call.alibi_slopes,
        sink=call.sink,
        qv=call.qv,
    )
    if appending:
        arguments.update(
            k=call.k,
            v=call.v,
            cu_seqlens_k_new=_contiguous(call.cu_seqlens_k_new),
            rotary_cos=_angles(call, call.rotary_cos),
            rotary_sin=_angles(call, call.rotary_sin),
            rotary_seqlens=_contiguous(call.rotary_seqlens),
        )
    return arguments


def _angles(call: CacheArguments, table: Tensor | None) -> Tensor | None:
    """Cosines or sines in a dtype that the kernel reads: it computes in float32. Both have one."""
    assert (call.rotary_cos is None) == (call.rotary_sin is None)
    if table is None or call.rotary_cos is None or call.rotary_sin is None:
        return None
    dtypes = {call.rotary_cos.dtype, call.rotary_sin.dtype}
    return table if dtypes in ({call.q.dtype}, {torch.float32}) else table.float()


def _contiguous(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.contiguous()
