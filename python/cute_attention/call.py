"""A call, from what the user passes to its results.

A call that has been made before, but for the tensors and their lengths, takes the short way: a plan
is looked up and its op called, and that op checks the tensors. Everything else goes the long way:
the first call of its kind, one that the op refuses (so that the checks find words for why), one in
a graph that is traced, and whatever is not a plain tensor in a plain mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import EXTRA_DEFAULTS, EXTRAS, KEPT, Arguments
from .autograd import AttentionFunction, TransformedAttention, apply_eagerly
from .checked import as_autocast_does, checked
from .dispatch.backends import BACKENDS
from .dispatch.explain import explain_checked
from .dispatch.plans import plan_for, shortened
from .dispatch.record import is_recorded
from .dispatch.request import asked_around
from .dispatch.select import is_kept
from .native.core import Kernel
from .options import with_defaults
from .problem import Plan
from .semantics.dropout import as_seed

plans: dict[tuple[Any, ...], Plan] = {}
_MOST_PLANS = 4096  # beyond it all are forgotten: options may differ at every call
_PACKING = 4  # so many of the extras, the first, belong to packed sequences
_OTHER_DEFAULTS = EXTRA_DEFAULTS[_PACKING:]
# Options of these types mean the same where they are equal.
_KEY_TYPES = frozenset({bool, int, float, str, tuple, Kernel, type(None)})
# key_of raises them for wrong arguments.
_NO_PLAN = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
_PLACES = {name: EXTRAS.index(name) for name in KEPT}
_TENSORS = KEPT - {"dropout_p", "dropout_seed"}
_BIAS, _SLOPES, _P, _SEED = map(EXTRAS.index, ("bias", "alibi_slopes", "dropout_p", "dropout_seed"))
_NUMBERS = frozenset({int, float})

_autocast_is_on = torch._C._is_any_autocast_enabled
_functorch_is_on = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_gradients_are_on = torch.is_grad_enabled


def attend(
    name: str, q: Any, k: Any, v: Any, packing: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """`attention` or `attention_varlen`, by its name.

    Args:
        name: the function.
        q: queries.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        options: those that were passed.
    """
    if torch.compiler.is_dynamo_compiling():
        return _attend_checked(name, q, k, v, packing, options)[1]
    if _autocast_is_on() and isinstance(q, Tensor):
        q, k, v, bias = as_autocast_does(q.device, (q, k, v, options.get("bias")))
        if bias is not None:
            options = {**options, "bias": bias}
    extras, kind = packing, options
    if not KEPT.isdisjoint(options):
        extras, kind = apart(packing, options)
    try:
        key = key_of(name, q, v, kind)
        plan = plans.get(key)
    except _NO_PLAN:
        return _attend_checked(name, q, k, v, packing, options)[1]
    if plan is not None and is_plain(q, k, v, extras):
        if len(extras) > _BIAS:
            extras = settled(extras, q.device)
        try:
            return _run_at_once(plan, q, k, v, extras)
        except RuntimeError:  # the checks below say why, or the op again
            if len(extras) > _SEED:  # with the seed that is drawn, so that none is drawn twice
                options = {**options, "dropout_seed": extras[_SEED]}
    plan, results = _attend_checked(name, q, k, v, packing, options)
    if plan is not None and all(type(value) in _KEY_TYPES for value in kind.values()):
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = shortened(plan, len(extras))
    return results


def apart(
    packing: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The extras of a call with options of `KEPT`, and its options as they are part of the key: of
    a tensor, whether it is there, and of the seed of dropout nothing."""
    p = options.get("dropout_p", 0.0)
    drops = type(p) in _NUMBERS and p > 0
    tensors: list[str] = []
    if not _TENSORS.isdisjoint(options):
        tensors = [name for name in _TENSORS if options.get(name) is not None]
    if not tensors and not drops:
        return packing, options
    extras = [*(packing or EXTRA_DEFAULTS[:_PACKING]), *_OTHER_DEFAULTS]
    kind = dict(options)
    last = 0
    for name in tensors:
        place = _PLACES[name]
        extras[place], kind[name] = options[name], True
        last = max(last, place)
    if drops:
        extras[_P], extras[_SEED], kind["dropout_seed"] = p, options.get("dropout_seed"), None
        last = max(last, _SEED)
    return tuple(extras[: last + 1]), kind


def settled(extras: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The extras as ops take them: a bias of four dimensions, and a seed that is a tensor."""
    bias = extras[_BIAS]
    if bias is not None and bias.dim() < 4:
        extras = (*extras[:_BIAS], bias[(None,) * (4 - bias.dim())], *extras[_BIAS + 1 :])
    if len(extras) > _SEED and type(extras[_SEED]) is not Tensor:
        extras = (*extras[:_SEED], as_seed(extras[_SEED], device), *extras[_SEED + 1 :])
    return extras


def key_of(name: str, q: Any, v: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on. The types of the options are part of it: True == 1 == 1.0, but only
    one of them is right."""
    values = options.values()
    return (
        name,
        q.dtype,
        q.device,
        q.shape[-1],
        v.shape[-1],
        *asked_around(),
        *options,
        None,
        *values,
        *map(type, values),
        *map(type, options.get("window") or ()),
    )


def is_plain(q: Any, k: Any, v: Any, extras: tuple[Any, ...]) -> bool:
    """Whether these are tensors of no subclass, the extras are tensors, ints and None as they
    should be, and no mode is on that the short way knows nothing of."""
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and (not extras or _are_plain(extras))
        and not _functorch_is_on()
        and not _dispatch_modes()
        and forward_ad._current_level < 0
    )


def _are_plain(extras: tuple[Any, ...]) -> bool:
    types = tuple(map(type, extras))
    if types == _PACKED:
        return True
    plain = types[:_PACKING] in _PLAIN_PACKINGS
    plain = plain and all(map(operator.contains, _PLAIN_TYPES, types[_PACKING:]))
    slopes = extras[_SLOPES] if len(extras) > _SLOPES else None
    if plain and slopes is not None and slopes.requires_grad:
        return not _gradients_are_on()  # else the checks refuse them
    return plain


_NONE = type(None)
_PACKED = (Tensor, Tensor, int, int)
_PLAIN_PACKINGS = {_PACKED, (_NONE, _NONE, int, int)}
_PLAIN_TENSORS = {Tensor, torch.nn.Parameter, _NONE}
_OTHER_TYPES = {"dropout_p": _NUMBERS, "dropout_seed": {Tensor, int, _NONE}}
_PLAIN_TYPES = tuple(_OTHER_TYPES.get(name, _PLAIN_TENSORS) for name in EXTRAS[_PACKING:])


def _run_at_once(plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Any, ...]) -> Any:
    """The plan's op on tensors that it checks, with autograd where it is needed."""
    if _gradients_are_on() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (len(extras) > _PACKING and any(getattr(t, "requires_grad", False) for t in extras))
    ):
        return apply_eagerly(plan, q, k, v, *extras)
    op = plan.forward if plan.return_lse else plan.output
    return op(q, k, v, *plan.options, *extras)


def _attend_checked(
    name: str, q: Any, k: Any, v: Any, packing: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Plan | None, Any]:
    """The long way: a plan, where it may serve the next call of the kind at once, and the
    results."""
    given = with_defaults(name, options)
    call = checked(name, q, k, v, packing, given, options)
    is_explained = is_recorded(explain_checked, name, call, given)
    plan = plan_for(name, call, given)
    keeps = not (torch.compiler.is_compiling() or is_explained) and _may_be_kept(plan, call)
    return plan if keeps else None, _run(plan, call)


def _may_be_kept(plan: Plan, call: Arguments) -> bool:
    """Whether the plan serves all calls with the same key: its ops check the tensors, and take no
    other extras than those of packed sequences and of `KEPT`."""
    others = zip(EXTRAS[_PACKING:], call[-len(EXTRAS) + _PACKING :], _OTHER_DEFAULTS, strict=True)
    return (
        len(BACKENDS[plan.backend].brief) > 0
        and all(value is default or name in KEPT for name, value, default in others)
        and is_kept(plan.requested, *plan.problem)
    )


def _run(plan: Plan, call: Arguments) -> Any:
    """The plan's op, with autograd attached where it is needed."""
    q, k, v = call.q, call.k, call.v
    extras = call[-len(EXTRAS) :]
    if torch.compiler.is_compiling():
        if _needs_gradient(call):
            # Dynamo refuses a tensor that comes twice, as in attention(x, x, x).
            inputs = [t.view_as(t) if isinstance(t, Tensor) else t for t in (q, k, v, *extras)]
            return AttentionFunction.apply(plan, *inputs)
    elif torch._C._are_functorch_transforms_active():
        results = TransformedAttention.apply(plan, q, k, v, *extras)
        return results if plan.return_lse else results[0]
    # Inside a dual_level, the Function is what refuses forward-mode AD.
    elif _needs_gradient(call) or forward_ad._current_level >= 0:
        return AttentionFunction.apply(plan, q, k, v, *extras)
    op = plan.forward if plan.return_lse else plan.output
    return op(q, k, v, *plan.options, *extras)


def _needs_gradient(call: Arguments) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in call
    )
