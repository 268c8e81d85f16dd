"""Plans: from the kind of a call to the ops that run, and from there to those of its gradient.

Head dims that are not whole vectors, as the kernels load them, are filled up with zeros here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import Arguments, kind_of
from ..ops.schema import Family, brief
from ..problem import Backward, Plan, Problem
from .backends import BACKENDS
from .request import check_name, requested_backend, requested_rows
from .select import is_kept, select


def plan_for(name: str, call: Arguments, options: dict[str, Any]) -> Plan:
    """What runs for a call of the function `name`.

    Raises:
        TypeError: the backend is no string, or the kernel is none.
        ValueError: there is no such backend.
        BackendError: the backend or the kernel that was asked for does not serve the call.
    """
    check_name(name, "backend", options["backend"])
    requested = requested_backend(options["backend"])
    forward_row, backward_row = requested_rows(name, options["kernel"])
    problem = kind_of(call, forward_row)
    backend = BACKENDS[select(requested, *problem)]
    ops = _fitted(backend.ops, problem, backend.multiple)
    choices = (
        forward_row or backend.name,
        call.scale,
        call.window_left,
        call.window_right,
        call.softcap,
    )
    return Plan(
        problem=problem,
        requested=requested,
        backend=backend.name,
        forward=ops.forward,
        output=ops.output,
        options=choices,
        choices=choices,
        backward_row=backward_row,
        deterministic=options["deterministic"],
        return_lse=options["return_lse"],
        brief_extras=None,
        backward=[],
    )


def shortened(plan: Plan, extras: int) -> Plan:
    """The plan for calls outside of traced code that need no checks: with the functions in C++ that
    OpOverloads pass their arguments on to, which takes half a microsecond; brief ones where the
    backend has them for this number of extras."""
    backend = BACKENDS[plan.backend]
    is_brief = extras in backend.brief
    ops = backend.brief[extras] if is_brief else backend.ops
    ops = _fitted(_in_cpp(ops), plan.problem, backend.multiple)
    return plan._replace(
        forward=ops.forward,
        output=ops.output,
        options=brief(plan.choices) if is_brief else plan.choices,
        brief_extras=extras if is_brief else None,
        backward=[],
    )


def backward_of(plan: Plan) -> Backward:
    """What runs for the gradient of a plan, chosen here at the first backward: only then may
    `select` warn of falling back. The choice is kept where `select` keeps it."""
    if plan.backward:
        return plan.backward[0]
    problem = plan.problem._replace(direction="backward", row=plan.backward_row)
    backend = BACKENDS[select(plan.requested, *problem)]
    choices = (plan.backward_row or backend.name, *plan.choices[1:])
    ops, options = backend.ops, choices
    if plan.brief_extras is not None and plan.brief_extras in backend.brief:
        ops, options = _in_cpp(backend.brief[plan.brief_extras]), brief(choices)
    found = Backward(_fitted(ops, plan.problem, backend.multiple).backward, options)
    if not torch.compiler.is_compiling() and is_kept(plan.requested, *problem):
        plan.backward.append(found)
    return found


def _in_cpp(ops: Family) -> Family:
    return Family(*(op.op for op in cast("tuple[Any, ...]", ops)))


def _fitted(ops: Family, problem: Problem, multiple: int) -> Family:
    """The ops for head dims that need not be multiples of `multiple`."""
    if problem.head_dim % multiple == 0 and problem.head_dim_v % multiple == 0:
        return ops
    return Family(
        functools.partial(_filled_forward, ops.forward, multiple),
        functools.partial(_filled_output, ops.output, multiple),
        functools.partial(_filled_backward, ops.backward, multiple),
    )


def _filled_forward(
    op: Callable[..., Any], multiple: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, lse = op(*_filled(multiple, q, k, v), *rest)
    return _first_columns(out, v.shape[-1]), lse


def _filled_output(
    op: Callable[..., Any], multiple: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Tensor:
    return _first_columns(op(*_filled(multiple, q, k, v), *rest), v.shape[-1])


def _filled_backward(
    op: Callable[..., Any],
    multiple: int,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    deterministic: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    whole_grad_out, whole_out, *inputs = _filled(multiple, grad_out, out, q, k, v)
    grads = op(whole_grad_out, grad_lse, whole_out, lse, deterministic, *inputs, *rest)
    dq, dk, dv, *others = grads
    pairs = ((dq, q), (dk, k), (dv, v))
    return (*(_first_columns(grad, t.shape[-1]) for grad, t in pairs), *others)


def _filled(multiple: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors with zeros up to the next head dim that the backend takes."""
    missing = [-tensor.shape[-1] % multiple for tensor in tensors]
    return [pad(t, (0, n)) if n else t for t, n in zip(tensors, missing, strict=True)]


def _first_columns(tensor: Tensor, columns: int) -> Tensor:
    """The tensor without what `_filled` has added, contiguous."""
    return tensor if tensor.shape[-1] == columns else tensor[..., :columns].contiguous()
