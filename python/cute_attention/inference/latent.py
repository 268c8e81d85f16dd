"""Latent attention (MLA) in its absorbed form, which kernels read as a call with qv (docs/mla.md).

Such calls come in two forms. With `qv` the columns of keys that are values too are `v_cache`, and
`k_cache` has the others. Without it keys have all columns, and `v_cache` is a view of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments

WIDEST = 256  # columns of the keys of all kernels that do not read qv


def with_qv(call: CacheArguments) -> CacheArguments:
    """The call as one with qv, where its values are the first columns of its keys, and these are
    wider than other kernels serve. Tensors become views. All other calls are returned as they
    are."""
    if call.qv is not None or not values_in_keys(call.k_cache, call.v_cache):
        return call
    q, k_cache, qv = parted(call.q, call.k_cache, call.v_cache)
    return call._replace(q=q, k_cache=k_cache, qv=qv)


def parted(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k_cache without the columns that are values, and those of q, which are qv."""
    width = v_cache.shape[-1]
    return q[..., width:], k_cache[..., width:], q[..., :width]


def is_for_qv_kernel(call: CacheArguments) -> bool:
    """Whether a call of the form `with_qv` asks for a kernel that reads qv. Of others with qv
    kernels get queries and keys with all columns beside each other."""
    return call.qv is not None and call.q.shape[-1] + call.qv.shape[-1] > WIDEST


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether the values of a cache are the first columns of its keys, and these are wider than
    other kernels serve. Never in a graph that is compiled: its guards do not tell who shares
    memory."""
    if not WIDEST < k.shape[-1] > v.shape[-1] or torch.compiler.is_compiling():
        return False
    return (
        k.untyped_storage()._cdata == v.untyped_storage()._cdata
        and k.storage_offset() == v.storage_offset()
        and k.stride() == v.stride()
    )
