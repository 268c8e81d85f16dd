"""Forward and gradient as two calls, for libraries that attach autograd themselves.

Such a library keeps the output and the LSE of the forward and hands them back for the gradient, in
a thread of its own choosing. So nothing is remembered between the two calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..arguments import EXTRAS, OPTIONAL_GRADIENTS, Arguments, kind_of
from ..checked import checked
from ..dispatch.backends import survey
from ..dispatch.plans import backward_of, plan_for
from ..dispatch.request import environment_backend
from ..options import with_defaults
from ..problem import Problem

_ATTENTION: dict[str, Any] = {"attention": attention, "attention_varlen": attention_varlen}


@torch.no_grad()
def forward(
    name: str, q: Tensor, k: Tensor, v: Tensor, packing: tuple[Any, ...], **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and LSE of `attention` or `attention_varlen`, by its name.

    Args:
        name: the function.
        q: queries.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        **options: those of the function, without `return_lse`.
    """
    return _ATTENTION[name](q, k, v, *packing, return_lse=True, **options)


@torch.no_grad()
def gradients(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, ...],
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> dict[str, Tensor]:
    """The gradients of `forward`, by argument: of q, k and v, and of bias and sink where the call
    has them. The other arguments are those of `forward`, and its results; a call with dropout
    passes the seed."""
    given = with_defaults(name, options)
    call = checked(name, q, k, v, packing, given, options)
    return gradients_of(name, call, given, grad_out, out, lse)


def gradients_of(
    name: str,
    call: Arguments,
    given: dict[str, Any],
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
) -> dict[str, Tensor]:
    """`gradients` of checked arguments; `given` are all options. `out` and `lse` are contiguous."""
    op, choices = backward_of(plan_for(name, call, given))
    extras = call[-len(EXTRAS) :]
    needs = [getattr(call, argument) is not None for argument in OPTIONAL_GRADIENTS]
    deterministic = given["deterministic"] or torch.are_deterministic_algorithms_enabled()
    grads = op(
        grad_out, None, out, lse, deterministic, call.q, call.k, call.v, *choices, *extras, *needs
    )
    names = ("q", "k", "v", *OPTIONAL_GRADIENTS)
    wanted = (True, True, True, *needs)
    return {n: grad for n, grad, want in zip(names, grads, wanted, strict=True) if want}


def kernels_serve(
    name: str, q: Tensor, k: Tensor, v: Tensor, packing: tuple[Any, ...], **options: Any
) -> bool:
    """Whether kernels run for a call and for its gradient, by what all threads agree on: not by
    `use_backend`, which the thread of the gradient does not see. Where the environment asks for a
    backend by name, that one is meant to run, so the answer is yes."""
    if environment_backend() != "auto":
        return True
    call = checked(name, q, k, v, packing, with_defaults(name, options), options)
    problem = kind_of(call)
    if problem not in _served:
        reports = [survey(problem), survey(problem._replace(direction="backward"))]
        serves = all(any(r.serves and r.backend != "reference" for r in each) for each in reports)
        if any(report.failed for each in reports for report in each):
            return serves  # which may be otherwise the next time
        _served[problem] = serves
    return _served[problem]


_served: dict[Problem, bool] = {}  # both directions
