"""Calls that have been made before, but for what their tensors contain: the op of the kernels at
once, since no check can say anything new."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..dispatch.request import asked_around
from ..native.core import Kernel
from ..ops.cache import ATTEND_CACHE
from .in_place import LONGEST_AT, TENSORS, appends, obstacle, op_arguments

_MOST = 4096  # beyond it all are forgotten
_LONGEST = "max_seqlen_k"
_TYPES = frozenset({bool, int, float, str, tuple, Kernel, type(None)})


class CachePlan(NamedTuple):
    """What the op is told."""

    arguments: tuple[Any, ...]  # None in the places of tensors
    tensors: tuple[tuple[int, str], ...]  # their places and names
    room: int  # tokens of a sequence that there is room for
    return_lse: bool


plans: dict[tuple[Any, ...], CachePlan] = {}


def key_of(given: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that checks and choices read of a call: of tensors all but their numbers. None where
    there is more: a tensor of a subclass, a mode, or code that is traced."""
    if (
        torch.compiler.is_dynamo_compiling()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    words: list[Any] = [torch.is_grad_enabled(), *asked_around()]
    for name, value in given.items():
        kind = type(value)
        if kind is Tensor:
            words += (name, value.shape, value.stride(), value.dtype, value.device)
            words.append(value.requires_grad)
        elif kind is int and name == _LONGEST and value > 0:
            words += (name, kind)  # it grows with every step, and only the op reads it
        elif kind in _TYPES:
            words += (name, kind, value)
            if kind is tuple:  # a window: True == 1 == 1.0, but only one of them is right
                words += map(type, value)
        else:
            return None
    return tuple(words)


def run(plan: CachePlan, given: dict[str, Any]) -> Any:
    """The results of a call of the plan's kind."""
    arguments = list(plan.arguments)
    for place, name in plan.tensors:
        arguments[place] = given[name]
    if longest := given.get(_LONGEST):
        arguments[LONGEST_AT] = min(longest, plan.room)
    out, lse = ATTEND_CACHE(*arguments)
    return (out, lse) if plan.return_lse else out


def remember(
    key: tuple[Any, ...] | None, call: CacheArguments, given: dict[str, Any], return_lse: bool
) -> None:
    """Keeps a plan for calls of the key, where a kernel reads the cache of this one, and is told
    the very tensors that were passed."""
    appending = call.k is not None
    if key is None or obstacle(call) or not call.q.numel() or (appending and not appends(call)):
        return
    arguments = list(op_arguments(call, call.q, call.cache_seqlens, appending))
    tensors: list[tuple[int, str]] = []
    for place, name in enumerate(TENSORS[: len(arguments)]):
        value = arguments[place]
        if not name or value is None:
            continue
        if name == "cu_seqlens_k_new" and given.get(name) is None:
            name = "cu_seqlens_q"  # as many new keys as queries
        if value is not given.get(name):
            return
        tensors.append((place, name))
        arguments[place] = None
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = CachePlan(tuple(arguments), tuple(tensors), call.room, return_lse)
