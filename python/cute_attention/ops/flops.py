"""FLOP formulas for torch.utils.flop_counter.

As for PyTorch's own attention: two matrix products forward (2 * (head_dim + head_dim_v) for each
query, key and head) and five backward, whatever the mask: causal and windowed calls count as dense
ones. Packed sequences count by their own lengths, or, where cu_seqlens has no values (fake
tensors), as if each were the longest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import Arguments
from ..cache_arguments import CacheArguments
from . import cache as cache  # defines the ops that are named below
from .schema import backward_arguments, forward_arguments, spelled_out


def _pairs(call: Arguments) -> int:
    """Query-key pairs of one head, over the whole batch."""
    offsets_q, offsets_k = call.cu_seqlens_q, call.cu_seqlens_k
    if offsets_q is None or offsets_k is None or _is_hollow(offsets_q):
        return call.batch * call.seqlen_q * call.seqlen_k
    lengths = zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True)
    return sum(length_q * length_k for length_q, length_k in lengths)


def _is_hollow(tensor: Tensor) -> bool:
    """Whether the tensor has no values to read."""
    return type(tensor) is not Tensor or tensor.is_meta


def _forward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = forward_arguments(args, kwargs)
    return 2 * _pairs(call) * call.q.shape[-2] * (call.q.shape[-1] + call.v.shape[-1])


def _backward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    _, call, _ = backward_arguments(args, kwargs)
    # Of head_dim: scores again, dq, dk. Of head_dim_v: dp, dv.
    products = 3 * call.q.shape[-1] + 2 * call.v.shape[-1]
    return 2 * _pairs(call) * call.q.shape[-2] * products


def _cached(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Each query counts with all tokens of its sequence, the new ones and the padding included; all
    that there is room for where cache_seqlens has no values."""
    call = CacheArguments(*args, **kwargs)
    heads, head_dim = call.q.shape[-2:]
    if call.qv is not None:
        head_dim += call.qv.shape[-1]
    products = 2 * heads * (head_dim + call.v_cache.shape[-1])
    queries: list[int] = [call.q.shape[0 if call.packed else 1]] * call.batch
    if _is_hollow(call.cache_seqlens):
        rows = call.q.shape[0] if call.packed else sum(queries)
        return products * rows * call.room
    if call.cu_seqlens_q is not None:
        queries = call.cu_seqlens_q.diff().tolist()
    new = [0] * call.batch
    if call.cu_seqlens_k_new is not None:
        new = call.cu_seqlens_k_new.diff().tolist()
    elif call.k is not None:
        new = [call.k.shape[1]] * call.batch
    lengths = zip(queries, call.cache_seqlens.tolist(), new, strict=True)
    return products * sum(many * (cached + more) for many, cached, more in lengths)


_OPS = torch.ops.cute_attention
for _prefix in ("", "reference_"):
    register_flop_formula(getattr(_OPS, f"{_prefix}forward"), get_raw=True)(_forward)
    register_flop_formula(getattr(_OPS, f"{_prefix}backward"), get_raw=True)(_backward)
    register_flop_formula(getattr(_OPS, f"{_prefix}cached_forward"), get_raw=True)(_cached)
for _prefix in ("brief_", "brief_packed_"):
    register_flop_formula(getattr(_OPS, f"{_prefix}forward"), get_raw=True)(spelled_out(_forward))
    register_flop_formula(getattr(_OPS, f"{_prefix}backward"), get_raw=True)(
        spelled_out(_backward, 8)
    )
