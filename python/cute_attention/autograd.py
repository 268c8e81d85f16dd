"""How autograd is attached to the ops.

Measured with an op that does nothing (3.4 us a call: two small tensors from a warm dispatcher; one
core of an AMD EPYC, torch 2.13): called with gradients through torch.autograd.Function 11 us,
through torch.library.register_autograd 52 us, through an autograd.Function with a separate
`setup_context` 41 us; called without gradients and without a Function 3.4 us.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .arguments import EXTRA_DEFAULTS, EXTRAS, OPTIONAL_GRADIENTS
from .dispatch.plans import backward_of
from .ops.schema import one_by_one
from .problem import Plan

# Where the optional gradients are among `EXTRAS`.
_PLACES = tuple(EXTRAS.index(name) for name in OPTIONAL_GRADIENTS)
_PACKED, _PACKED_KEYS, _LONGEST, _SINK = map(
    EXTRAS.index, ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_k", "sink")
)


class AttentionFunction(torch.autograd.Function):
    """A plan's forward with its gradient: `apply(plan, q, k, v, *extras)`, where the extras are the
    first of `EXTRAS`, as many as do not have their defaults."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *extras: Any) -> Any:
        """Returns the output, and the LSE where it was asked for."""
        out, lse = plan.forward(q, k, v, *plan.options, *extras)
        if extras:
            _save(ctx, plan, (q, k, v, out, lse), extras)
        else:
            ctx.call = plan, (), ()
            ctx.save_for_backward(q, k, v, out, lse)
        if not plan.return_lse:
            return out
        if not torch.compiler.is_compiling():  # which knows no set_materialize_grads
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        """Gradients of all arguments of `apply`."""
        plan, extras, places = ctx.call
        q, k, v, out, lse, *others = ctx.saved_tensors
        _, needs_q, needs_k, needs_v, *needs_extra = ctx.needs_input_grad
        needs: list[bool] = []  # of OPTIONAL_GRADIENTS; empty where none is
        if places:
            extras = _with_tensors(extras, places, others)
        if True in needs_extra:
            needs = [place < len(extras) and needs_extra[place] for place in _PLACES]
            extras = (*extras, *EXTRA_DEFAULTS[len(extras) :], *needs)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if not plan.return_lse:
            grad_lse = None  # these are zeros where TransformedAttention is compiled
        deterministic = plan.deterministic or torch.are_deterministic_algorithms_enabled()
        op, options = backward_of(plan)
        grads = op(grad_out, grad_lse, out, lse, deterministic, q, k, v, *options, *extras)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            anchors = [t for t in (grad_out, grad_lse, q, k, v, *others) if t is not None]
            grads = _Once.apply(len(grads), *grads, *anchors)
        dq, dk, dv, *optional = grads
        if grad_lse is None and _has_one_key(k, extras):
            kept = _kept_of_one_key(extras)
            dq, dk = dq * kept, dk * kept  # where a kernel leaves its rounding; NaN stays
        of_inputs = (
            None,
            dq if needs_q else None,
            dk if needs_k else None,
            dv if needs_v else None,
        )
        if not needs_extra:
            return of_inputs
        of_extras: list[Tensor | None] = [None] * len(needs_extra)
        for place, needed, grad in zip(_PLACES, needs, optional, strict=False):  # none or all
            if needed:
                of_extras[place] = grad
        return *of_inputs, *of_extras


def _has_one_key(k: Tensor, extras: Any) -> bool:
    """Whether the probability of the only key is 1, whatever q and k are: then the gradient of an
    output with respect to them is 0."""
    if len(extras) > _SINK and extras[_SINK] is not None:
        return False
    return bool((extras[_LONGEST] if _is_packed(extras) else k.shape[1]) == 1)


def _is_packed(extras: Any) -> bool:
    return len(extras) > _LONGEST and extras[_PACKED] is not None


def _kept_of_one_key(extras: Any) -> Any:
    """What the gradients of q and k are multiplied by: 0; but 1 where a sequence has more keys than
    the caller said, which only the device knows: there the kernel's gradients are right or NaN."""
    if not _is_packed(extras):
        return 0
    return (extras[_PACKED_KEYS].diff() > 1).any().int()


def _save(ctx: Any, plan: Plan, tensors: tuple[Tensor, ...], extras: tuple[Any, ...]) -> None:
    """Tensors as autograd keeps them, so that it sees what is changed in place; the rest, and where
    the tensors were, as one attribute."""
    call: tuple[Any, ...] = plan, (), ()
    if extras:
        others, places = list(extras), []
        for place, extra in enumerate(extras):
            if isinstance(extra, Tensor):
                others[place] = None
                places.append(place)
                tensors += (extra,)
        call = plan, others, places
    ctx.call = call
    ctx.save_for_backward(*tensors)


def _with_tensors(extras: list[Any], places: list[int], tensors: list[Tensor]) -> list[Any]:
    """The extras of `_save`, with the tensors in their places."""
    found = list(extras)
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found


# Like `AttentionFunction.apply`, but it does not look whether a transform of torch.func is active,
# which would take a microsecond of each call. Its caller has already looked.
apply_eagerly = super(torch.autograd.Function, AttentionFunction).apply


class TransformedAttention(torch.autograd.Function):
    """AttentionFunction in the form that torch.func.grad and vmap need, which is slower. It returns
    the LSE always."""

    @staticmethod
    def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, *extras: Any) -> Any:
        """Returns the output and the LSE."""
        return plan.forward(q, k, v, *plan.options, *extras)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Saves what the backward reads."""
        plan, q, k, v, *extras = inputs
        _save(ctx, plan, (q, k, v, *output), tuple(extras))
        ctx.set_materialize_grads(False)

    backward = AttentionFunction.backward

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: Plan, *inputs: Any) -> Any:
        """One call for each element of the mapped dimension."""
        run = functools.partial(TransformedAttention.apply, plan)
        return one_by_one(run, info.batch_size, in_dims[1:], inputs)


class _Once(torch.autograd.Function):
    """Gradients that raise when differentiated again, where PyTorch would give zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *grads_and_anchors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads_and_anchors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "attention: second derivatives are not implemented; "
            "cute_attention.attention_reference can be differentiated to any order"
        )
