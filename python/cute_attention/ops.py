"""The torch ops `cute_attention::*`, their fakes, and how autograd is attached.

    forward, backward   kernels; implemented by the C++ binding, see _binding.py
    reference_forward   blockwise.py
    reference_backward  blockwise.py: the gradient of either forward

All are defined here, once, when this file is imported: Python's import lock makes that safe in any
number of threads, and it needs neither the binding nor CUDA. The ops themselves are functional and
know nothing of autograd. `AttentionFunction` attaches it.
Measured with an op that does nothing (3.4 us a call: two small tensors from a warm dispatcher; one
core of an AMD EPYC, torch 2.13): called with gradients through torch.autograd.Function 11 us,
through torch.library.register_autograd 52 us, through an autograd.Function with a separate
`setup_context` 41 us; called without gradients and without a Function 3.4 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._check import packed_lengths
from .backend import select_backward
from .blockwise import AttentionSpec, blockwise_backward, blockwise_forward
from .survey import VECTOR, Features, specialized

# SymInt, so that a graph compiled for dynamic shapes serves every length.
_SIZES = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float softcap, SymInt window_left, "
    "SymInt window_right"
)
_OPTIONS = f"{_SIZES}, float dropout_p"
_OFFSETS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_EXTRAS = f"{_OFFSETS}, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? dropout_seed"

_library = torch.library.Library("cute_attention", "FRAGMENT")
_library.define(
    f"reference_forward(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_OPTIONS}) "
    "-> (Tensor out, Tensor lse)"
)
_library.define(
    "reference_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_EXTRAS}, {_OPTIONS}, bool needs_bias, bool needs_sink) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_OFFSETS}, {_SIZES}, str backend) "
    "-> (Tensor out, Tensor lse)"
)
_library.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_OFFSETS}, {_SIZES}, bool deterministic, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


class Call(NamedTuple):
    """Everything about a call that is no tensor; the ops take the third to the ninth, in order."""

    backend: str  # that serves the forward
    requested: str  # what was asked for, "auto" included
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    softcap: float  # 0 where there is none
    window_left: int  # -1 is unbounded
    window_right: int
    dropout_p: float
    deterministic: bool
    return_lse: bool
    features: Features


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the ops' arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    dropout_seed: Tensor | None


def _spec(
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    dropout_p: float,
) -> AttentionSpec:
    return AttentionSpec(
        scale=scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        dropout_p=dropout_p,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


@torch.library.impl(_library, "reference_forward", "CompositeExplicitAutograd")
def _reference_forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, spec = Tensors(*args[:9]), _spec(*args[9:])
    q, k, _, cu_seqlens_q, cu_seqlens_k, *_ = tensors
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packed_lengths("q", cu_seqlens_q, q, spec.max_seqlen_q)
        packed_lengths("k", cu_seqlens_k, k, spec.max_seqlen_k)
    return blockwise_forward(*tensors, spec)


@torch.library.impl(_library, "reference_backward", "CompositeExplicitAutograd")
def _reference_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, q, k, v, out, lse, *rest = args
    extras, (*options, needs_bias, needs_sink) = Tensors(q, k, v, *rest[:6])[3:], rest[6:]
    results = (grad_out, grad_lse, q, k, v, out, lse)
    grads = blockwise_backward(*results, *extras, _spec(*options), needs_bias, needs_sink)
    # An op returns tensors: an empty one stands for "no gradient".
    return tuple(grad_out.new_empty(0) if grad is None else grad for grad in grads)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of any forward op."""
    *rows, heads, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = (rows[0], heads, rows[1]) if len(rows) == 2 else (heads, rows[0])
    return q.new_empty((*rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


def _fake_reference_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, _, q, k, v, *_ = args
    bias, sink, needs_bias, needs_sink = args[9], args[11], args[-2], args[-1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias.new_empty(bias.shape) if needs_bias else grad_out.new_empty(0),
        sink.new_empty(sink.shape) if needs_sink else grad_out.new_empty(0),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the kernels' backward op."""
    q, k, v = args[2:5]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _one_by_one(
    run: Callable[..., Any], batch_size: int, in_dims: Any, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of torch.vmap: `run` for each element of the mapped dimension, the results stacked;
    where there is no element, for one of zeros, whose results have the shapes and are dropped."""

    def element(index: int) -> Iterator[Any]:
        for argument, dim in zip(arguments, in_dims, strict=True):
            if not isinstance(argument, Tensor) or dim is None:
                yield argument
            elif batch_size:
                yield argument.select(dim, index)
            else:
                yield argument.sum(dim, dtype=argument.dtype)

    results = [run(*element(index)) for index in range(max(batch_size, 1))]
    stacked = tuple(torch.stack(parts)[:batch_size] for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _vmap_rule(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda info, in_dims, *arguments: _one_by_one(op, info.batch_size, in_dims, arguments)


for _name, _fake in (
    ("reference_forward", _fake_forward),
    ("reference_backward", _fake_reference_backward),
    ("forward", _fake_forward),
    ("backward", _fake_backward),
):
    torch.library.register_fake(f"cute_attention::{_name}", _fake, lib=_library)
    _op = getattr(torch.ops.cute_attention, _name).default
    torch.library.register_vmap(f"cute_attention::{_name}", _vmap_rule(_op), lib=_library)


def run_forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Output and LSE by the backend of `call`, without autograd."""
    if call.backend == "reference":
        return torch.ops.cute_attention.reference_forward.default(*tensors, *call[2:9])
    q, k, v, *offsets = tensors[:5]
    head_dim_v = v.shape[-1]
    if q.shape[-1] % VECTOR or head_dim_v % VECTOR:
        q, k, v = map(_whole_vectors, (q, k, v))
    op = torch.ops.cute_attention.forward.default
    out, lse = op(q, k, v, *offsets, *call[2:8], call.backend)
    return _first_columns(out, head_dim_v), lse


def _whole_vectors(tensor: Tensor) -> Tensor:
    """The tensor with zeros up to the next whole vector of a row: what kernels load."""
    missing = -tensor.shape[-1] % VECTOR
    return pad(tensor, (0, missing)) if missing else tensor


def _first_columns(tensor: Tensor, columns: int) -> Tensor:
    """The tensor without what `_whole_vectors` has added, contiguous."""
    return tensor if tensor.shape[-1] == columns else tensor[..., :columns].contiguous()


class AttentionFunction(torch.autograd.Function):
    """The ops with autograd. Its tensors are those of `Tensors`, in that order, after the call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(call, Tensors(*inputs))  # type: ignore[arg-type]
        ctx.call = call
        ctx.save_for_backward(*inputs, out, lse)
        if not torch.compiler.is_compiling():  # which knows no set_materialize_grads
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call: Call = ctx.call
        *inputs, out, lse = ctx.saved_tensors
        tensors = Tensors(*inputs)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if not call.return_lse:
            grad_lse = None  # compiled, these are zeros
        needs = ctx.needs_input_grad
        needs_bias, needs_sink = needs[6], needs[8]
        dq, dk, dv, dbias, dsink = run_backward(
            call, tensors, (grad_out, grad_lse, out, lse), (needs_bias, needs_sink)
        )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            anchors = [t for t in (grad_out, grad_lse, *inputs) if t is not None]
            dq, dk, dv, dbias, dsink = _Once.apply(dq, dk, dv, dbias, dsink, *anchors)
        return (
            None,
            dq if needs[1] else None,
            dk if needs[2] else None,
            dv if needs[3] else None,
            None,
            None,
            dbias if needs_bias else None,
            None,
            dsink if needs_sink else None,
            None,
        )


def run_backward(
    call: Call,
    tensors: Tensors,
    results: tuple[Tensor, Tensor | None, Tensor, Tensor],
    needs: tuple[bool, bool],
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias and sink, the last two empty where not needed.

    Args:
        call: of the forward.
        tensors: of the forward.
        results: grad_out, grad_lse, out, lse.
        needs: whether bias and sink need their gradients.
    """
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    grad_out, grad_lse, out, lse = results
    q, k, v, *extras = tensors
    backend = select_backward(
        q.dtype,
        specialized(q.shape[-1]),
        specialized(v.shape[-1]),
        call.features,
        q.device,
        call.requested,
        deterministic,
    )
    saved = (grad_out, grad_lse, q, k, v, out, lse)
    if backend == "reference":
        op = torch.ops.cute_attention.reference_backward.default
        return op(*saved, *extras, *call[2:9], *needs)
    if q.shape[-1] % VECTOR or v.shape[-1] % VECTOR:
        grad_out, q_whole, k_whole, v_whole, out = map(_whole_vectors, (grad_out, q, k, v, out))
        saved = (grad_out, grad_lse, q_whole, k_whole, v_whole, out, lse)
    op = torch.ops.cute_attention.backward.default
    dq, dk, dv = op(*saved, *extras[:2], *call[2:8], deterministic, backend)
    grads = (_first_columns(grad, t.shape[-1]) for grad, t in ((dq, q), (dk, k), (dv, v)))
    return (*grads, grad_out.new_empty(0), grad_out.new_empty(0))


class TransformedAttention(torch.autograd.Function):
    """AttentionFunction in the form that torch.func.grad and vmap need, which is slower."""

    @staticmethod
    def forward(call: Call, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        return run_forward(call, Tensors(*inputs))  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    backward = AttentionFunction.backward

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, *inputs: Tensor | None) -> Any:
        """One call for each element of the mapped dimension."""
        run = functools.partial(TransformedAttention.apply, call)
        return _one_by_one(run, info.batch_size, in_dims[1:], inputs)


class _Once(torch.autograd.Function):
    """Gradients that raise when differentiated again, where PyTorch would give zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*grads_and_anchors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads_and_anchors[:5])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "attention: second derivatives are not implemented; "
            "cute_attention.attention_reference can be differentiated to any order"
        )
