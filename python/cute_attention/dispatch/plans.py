"""Plans: from the kind of a call to the ops that run, and from there to those of its gradient.

Head dims that are not whole vectors, as the kernels load them, are filled up with zeros here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import Arguments, kind_of
from ..problem import Backward, Plan, Problem
from .backends import BACKENDS, Backend
from .request import check_name, requested_backend
from .select import is_kept, select


def plan_for(name: str, call: Arguments, options: dict[str, Any]) -> Plan:
    """What runs for a call of the function `name`.

    Raises:
        TypeError: the backend is no string.
        ValueError: there is no such backend.
        BackendError: the backend that was asked for does not serve the call.
    """
    check_name(name, "backend", options["backend"])
    requested = requested_backend(options["backend"])
    problem = kind_of(call)
    backend = BACKENDS[select(requested, *problem)]
    forward: Callable[..., Any] = backend.ops.forward
    output: Callable[..., Any] = backend.ops.output
    if _fills_up(problem, backend):
        forward = functools.partial(_filled_forward, forward)
        output = functools.partial(_filled_output, output)
    return Plan(
        problem,
        requested,
        forward,
        output,
        (backend.name, call.scale, call.window_left, call.window_right, call.softcap),
        options["deterministic"],
        options["return_lse"],
        [],
    )


def backward_of(plan: Plan) -> Backward:
    """What runs for the gradient of a plan, chosen here at the first backward: only then may
    `select` warn of falling back. The choice is kept where `select` keeps it."""
    if plan.backward:
        return plan.backward[0]
    problem = ("backward", *plan.problem[1:])
    backend = BACKENDS[select(plan.requested, *problem)]
    op: Callable[..., Any] = backend.ops.backward
    if _fills_up(plan.problem, backend):
        op = functools.partial(_filled_backward, op)
    found = Backward(op, (backend.name, *plan.options[1:]))
    if not torch.compiler.is_compiling() and is_kept(plan.requested, *problem):
        plan.backward.append(found)
    return found


def _fills_up(problem: Problem, backend: Backend) -> bool:
    return problem.head_dim % backend.multiple != 0 or problem.head_dim_v % backend.multiple != 0


def _filled_forward(
    op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, backend: str, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, lse = op(*_filled(backend, q, k, v), backend, *rest)
    return _first_columns(out, v.shape[-1]), lse


def _filled_output(
    op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, backend: str, *rest: Any
) -> Tensor:
    return _first_columns(op(*_filled(backend, q, k, v), backend, *rest), v.shape[-1])


def _filled_backward(
    op: Callable[..., Any],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    deterministic: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    *rest: Any,
) -> tuple[Tensor, ...]:
    whole_grad_out, whole_out, *inputs = _filled(backend, grad_out, out, q, k, v)
    grads = op(whole_grad_out, grad_lse, whole_out, lse, deterministic, *inputs, backend, *rest)
    dq, dk, dv, *others = grads
    pairs = ((dq, q), (dk, k), (dv, v))
    return (*(_first_columns(grad, t.shape[-1]) for grad, t in pairs), *others)


def _filled(backend: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors with zeros up to the next head dim that the backend takes."""
    multiple = BACKENDS[backend].multiple
    missing = [-tensor.shape[-1] % multiple for tensor in tensors]
    return [pad(t, (0, n)) if n else t for t, n in zip(tensors, missing, strict=True)]


def _first_columns(tensor: Tensor, columns: int) -> Tensor:
    """The tensor without what `_filled` has added, contiguous."""
    return tensor if tensor.shape[-1] == columns else tensor[..., :columns].contiguous()
