"""The torch ops of a call with a KV cache, and their fakes; both have `CacheArguments`.

    cached_forward              kernels, by `inference/lowered.py` among PyTorch's operations
    reference_cached_forward    semantics/cache.py, on any device

Each has an overload `output` that returns no LSE. They write new keys and values into `k_cache` and
`v_cache`, which their schemas declare, and which may share their memory, as a view of the other.
They have no gradient.

    attend_cache                kernels, which read a cache, and append k and v where they are given

is what `cached_forward` calls on the way. The binding implements it for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_arguments import SCHEMA, CacheArguments
from ..semantics.cache import cached_forward


class CachedFamily(NamedTuple):
    """The ops of a backend."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    output: Callable[..., Tensor]


def _fake_output(*args: Any, **kwargs: Any) -> Tensor:
    call = CacheArguments(*args, **kwargs)
    return call.q.new_empty((*call.q.shape[:-1], call.v_cache.shape[-1]))


def _fake_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    q = CacheArguments(*args, **kwargs).q
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    *rows, heads, _head_dim = q.shape
    shape = (heads, rows[0]) if len(rows) == 1 else (rows[0], heads, rows[1])
    return _fake_output(*args, **kwargs), q.new_empty(shape, dtype=dtype)


def implement(
    prefix: str, run: Callable[[CacheArguments], tuple[Tensor, Tensor]], dispatch_key: str
) -> None:
    """Makes `run` what the ops of a prefix do for a dispatch key."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return run(CacheArguments(*args, **kwargs))

    def output(*args: Any, **kwargs: Any) -> Tensor:
        return run(CacheArguments(*args, **kwargs))[0]

    _library.impl(f"{prefix}cached_forward", forward, dispatch_key)
    _library.impl(f"{prefix}cached_forward.output", output, dispatch_key)


_library = torch.library.Library("cute_attention", "FRAGMENT")


def _define(prefix: str) -> CachedFamily:
    name = f"{prefix}cached_forward"
    for overload, results, fake in (
        ("", "(Tensor out, Tensor lse)", _fake_forward),
        (".output", "Tensor out", _fake_output),
    ):
        # The tag has the reason that ops/schema.py gives for its own.
        tags = (torch.Tag.needs_fixed_stride_order,)
        _library.define(f"{name}{overload}({SCHEMA}) -> {results}", tags=tags)
        torch.library.register_fake(f"cute_attention::{name}{overload}", fake, lib=_library)
    packet = getattr(torch.ops.cute_attention, name)
    return CachedFamily(packet.default, packet.output)


_library.define(
    "attend_cache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, str backend, float scale, "
    "SymInt window_left, SymInt window_right, float softcap, Tensor seqused_k, "
    "Tensor? cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? leftpad_k, "
    "Tensor? cache_batch_idx, Tensor? block_table, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? qv=None, "
    "SymInt num_splits=0, bool batch_invariant=False, Tensor? k=None, Tensor? v=None, "
    "Tensor? cu_seqlens_k_new=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, "
    "Tensor? rotary_seqlens=None, bool turns_each_query=False) "
    "-> (Tensor out, Tensor lse)"
)
ATTEND_CACHE = torch.ops.cute_attention.attend_cache.default
KERNELS = _define("")
REFERENCE = _define("reference_")
implement("reference_", cached_forward, "CompositeExplicitAutograd")
