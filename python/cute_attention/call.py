"""A call, from what the user passes to its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import EXTRAS, Arguments
from .autograd import AttentionFunction, TransformedAttention
from .checked import checked
from .dispatch.plans import plan_for
from .options import with_defaults
from .problem import Plan


def attend(
    name: str, q: Any, k: Any, v: Any, packing: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """`attention` or `attention_varlen`, by its name: checks, choice, and whatever tensors and
    modes need.

    Args:
        name: the function.
        q: queries.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        options: those that were passed.
    """
    given = with_defaults(name, options)
    call = checked(name, q, k, v, packing, given)
    return _run(plan_for(name, call, given), call)


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
