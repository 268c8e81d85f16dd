"""The torch ops of a call with a KV cache, and their fakes; both have `CacheArguments`.

    cached_forward              kernels, by `inference/lowered.py` among PyTorch's operations
    reference_cached_forward    semantics/cache.py, on any device

Each has an overload `output` that returns no LSE. They write new keys and values into `k_cache` and
`v_cache`, which their schemas declare, and which may share their memory, as a view of the other.
They have no gradient.

    attend_cache                kernels, which read a cache, and append k and v where they are given

is what `cached_forward` calls on the way, and what a call that comes again calls at once;
`brief_attend_cache` has fewer arguments. The binding implements both for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..cache_arguments import SCHEMA, CacheArguments
from ..semantics.cache import cached_forward
from .schema import brief

MOST_SPLITS = 128  # kMostSplits of params.h


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


# The text is that of `brief_options`. The optional arguments of a common call come first, in the
# order in which calls have them: what is left to its default takes a twentieth of a microsecond, so
# that the brief op has no others.
_BRIEF = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, str options, "
    "Tensor? k=None, Tensor? v=None, Tensor? block_table=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None, "
    "Tensor? cu_seqlens_k_new=None, SymInt? max_seqlen_k=None"
)
_FULL = (
    f"{_BRIEF}, Tensor? cache_batch_idx=None, Tensor? leftpad=None, Tensor? rotary_seqlens=None, "
    "Tensor? alibi_slopes=None, Tensor? sink=None, Tensor? qv=None"
)


def _define_kernel(name: str, arguments: str) -> CachedFamily:
    _library.define(f"{name}({arguments}) -> (Tensor out, Tensor lse)")
    _library.define(f"{name}.output({arguments}) -> Tensor out")
    packet = getattr(torch.ops.cute_attention, name)
    return CachedFamily(packet.default, packet.output)


ATTEND_CACHE = _define_kernel("attend_cache", _FULL)
BRIEF_ATTEND_CACHE = _define_kernel("brief_attend_cache", _BRIEF)


def _optional(ops: CachedFamily) -> tuple[str, ...]:
    schema = cast("Any", ops.forward)._schema
    return tuple(argument.name for argument in schema.arguments if argument.has_default_value())


OPTIONAL = _optional(ATTEND_CACHE)  # their optional arguments
BRIEF_OPTIONAL = _optional(BRIEF_ATTEND_CACHE)


def brief_options(call: CacheArguments) -> str:
    """What `attend_cache` is told in one text (`brief` of schema.py says why), for a call that is
    not in chunks."""
    (text,) = brief(
        (
            call.backend,
            call.scale,
            call.window_left,
            call.window_right,
            call.softcap,
            min(call.num_splits, MOST_SPLITS),
            int(call.batch_invariant),
            int(call.rotary_interleaved),
            int(call.is_masked),  # whether each query is turned by an angle of its own
        )
    )
    return text


KERNELS = _define("")
REFERENCE = _define("reference_")
implement("reference_", cached_forward, "CompositeExplicitAutograd")
