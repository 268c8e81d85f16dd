"""Calls that have been made before, but for their tensors and lengths: the op of the kernels at
once. It checks its tensors as `checked.py` does, and refuses what is not for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..checked import as_autocast_does
from ..dispatch.request import asked_around
from ..ops.cache import ATTEND_CACHE, BRIEF_ATTEND_CACHE, BRIEF_OPTIONAL, brief_options
from .checked import equal_lengths
from .in_place import appends, obstacle, optional_arguments
from .latent import WIDEST, parted, values_in_keys, with_qv

_MOST = 4096  # beyond it all are forgotten: options may differ at every call
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
# Options of these types mean the same where they are equal.
_KEY_TYPES = frozenset({bool, int, float, str, tuple, type(None)})
_LENGTHS = frozenset({"max_seqlen_q", "max_seqlen_k"})  # they differ from step to step
_LENGTH_TYPES = frozenset({Tensor, int})
_CAST = ("k", "v", "qv")  # by autocast, beside q
# key_of raises them for wrong arguments.
_NO_PLAN = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class CachePlan(NamedTuple):
    """The op, and what it is told beside tensors."""

    op: Callable[..., Any]
    text: str
    names: tuple[str, ...]  # which options are its arguments after the text
    is_latent: bool  # it gets tensors in the form `with_qv`, which are not passed so
    is_direct: bool  # it gets just what is passed


plans: dict[tuple[Any, ...] | None, CachePlan] = {}  # none has the key None

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_is_on = torch._C._are_functorch_transforms_active
_gradients_are_on = torch.is_grad_enabled


def key_of(tensors: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a plan depends on: of tensors among the options, that they are there. The types are part
    of it: True == 1 == 1.0, but only one of them is right. None where there is no plan.

    Args:
        tensors: q, k_cache, v_cache and cache_seqlens.
        options: those that were passed.
    """
    if not _are_plain(tensors, options):
        return None
    q, _k_cache, v_cache, cache_seqlens = tensors
    try:
        key = (
            type(cache_seqlens),
            q.dtype,
            q.device,
            q.shape[-1],
            v_cache.shape[-1],
            *asked_around(),
            *options,
            *map(type, options.values()),
            *map(type, options.get("window") or ()),
            *[
                value
                for name, value in options.items()
                if type(value) not in _TENSORS and name not in _LENGTHS
            ],
        )
        hash(key)
    except _NO_PLAN:
        return None
    return key


def as_cast(q: Any, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """q and the options as torch.autocast casts them."""
    if not isinstance(q, Tensor):
        return q, options
    there = {name: options[name] for name in _CAST if options.get(name) is not None}
    q, *cast = as_autocast_does(q.device, (q, *there.values()))
    return q, {**options, **dict(zip(there, cast, strict=True))}


def _are_plain(tensors: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether the tensors are of no subclass, and the lengths perhaps an int, no mode is on that
    the op knows nothing of, and no gradient is recorded."""
    q, k_cache, v_cache, cache_seqlens = tensors
    if not (
        type(q) is Tensor
        and type(k_cache) is Tensor
        and type(v_cache) is Tensor
        and type(cache_seqlens) in _LENGTH_TYPES
    ):
        return False
    if _functorch_is_on() or _dispatch_modes():
        return False
    return not _gradients_are_on() or not any(
        getattr(value, "requires_grad", False) for value in (*tensors, *options.values())
    )


def run(plan: CachePlan, tensors: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The results of a call with the plan's key.

    Raises:
        RuntimeError: the op refuses the call.
        IndexError: a tensor without dimensions.
    """
    q, k_cache, v_cache, cache_seqlens = tensors
    if type(cache_seqlens) is int:
        if cache_seqlens < 0:
            raise RuntimeError("cache_seqlens is negative")
        ends = options.get("cu_seqlens_q")
        batch = q.shape[0] if ends is None else ends.numel() - 1
        cache_seqlens = equal_lengths(batch, cache_seqlens, q.device)
    if plan.is_latent:
        if not values_in_keys(k_cache, v_cache):
            raise RuntimeError("v_cache is no view of k_cache")
        q, k_cache, qv = parted(q, k_cache, v_cache)
        options = {**options, "qv": qv}
    others = map(options.get, plan.names)
    return plan.op(q, k_cache, v_cache, cache_seqlens, plan.text, *others)


def remember(
    key: tuple[Any, ...],
    call: CacheArguments,
    equal: bool,
    options: Mapping[str, Any],
    return_lse: bool,
) -> None:
    """Keeps a plan for calls of the key, where a kernel reads the cache of this one, which had the
    options, and is told the very tensors that were passed. `equal`: the lengths were an int."""
    parts = with_qv(call)
    is_latent = parts is not call
    if not _may_be_kept(call, is_latent, options):
        return
    there = {**options, "qv": parts.qv}
    names = []
    for name, value in optional_arguments(parts, call.k is not None).items():
        given = there.get(name)
        if isinstance(value, Tensor) and value is not given:
            # Where nothing else is said, there are as many new keys as queries.
            if name != "cu_seqlens_k_new" or given is not None or value is not call.cu_seqlens_q:
                return
            name = "cu_seqlens_q"
        names.append(name)
    while names and there.get(names[-1]) is None:
        names.pop()
    ops = BRIEF_ATTEND_CACHE if len(names) <= len(BRIEF_OPTIONAL) else ATTEND_CACHE
    op: Any = ops.forward if return_lse else ops.output
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = CachePlan(
        op.op, brief_options(call), tuple(names), is_latent, not is_latent and not equal
    )


def _may_be_kept(call: CacheArguments, is_latent: bool, options: Mapping[str, Any]) -> bool:
    """Whether the op does all that a call of this kind asks for, or refuses it."""
    return (
        not obstacle(call)
        and (call.k is None or appends(call))
        and call.cache_seqlens.is_contiguous()
        and (is_latent or call.qv is not None or call.q.shape[-1] <= WIDEST)
        and all(type(value) in _KEY_TYPES | _TENSORS for value in options.values())
    )
