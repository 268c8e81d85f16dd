"""The torch ops `cute_attention::*` and their fakes; all have the arguments of `Arguments`.

    forward, backward                        kernels; the binding implements them for CUDA
    brief_forward, brief_backward            the same with the options in one text, see `brief`
    brief_packed_forward, ..._backward       these for packed sequences
    reference_forward, reference_backward    semantics/blockwise.py, on any device

Each forward has an overload `output` that returns no LSE. All are defined here, once, when this
file is imported: Python's import lock makes that safe in any number of threads, and it needs
neither the binding nor CUDA. The ops are functional and know nothing of autograd, which
`autograd.py` attaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import GRADIENTS, NAMES, OPTIONAL_GRADIENTS, SCHEMA, Arguments
from ..semantics.blockwise import blockwise_backward, blockwise_forward
from ..shapes import check_lengths

# What a backward takes before the arguments of its forward, and after them.
RESULTS = ("grad_out", "grad_lse", "out", "lse", "deterministic")
_RESULTS = "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool deterministic"
_BACKWARD = f"{_RESULTS}, {SCHEMA}" + "".join(
    f", bool needs_{name}=False" for name in OPTIONAL_GRADIENTS
)
# Of the brief ops, whose text says backend to softcap.
_INPUTS = "Tensor q, Tensor k, Tensor v, str options"
_PACKING = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in GRADIENTS)


class Family(NamedTuple):
    """The ops of a backend."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    output: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]


def brief(options: tuple[Any, ...]) -> tuple[str]:
    """The options of a plan, backend to softcap, as the one text that brief ops take.

    Each argument that a call passes through PyTorch's dispatcher takes 0.3 to 0.5 microseconds, and
    each that it leaves to its default 0.1.
    """
    return (" ".join(map(str, options)),)


def spelled_out(function: Callable[..., Any], place: int = 3) -> Callable[..., Any]:
    """`function`, which takes the arguments of an op, for the brief form of that op, whose text is
    at `place`."""

    def for_brief(*args: Any, **kwargs: Any) -> Any:
        backend, scale, window_left, window_right, softcap = args[place].split()
        sides = int(window_left), int(window_right)
        options = backend, float(scale), *sides, float(softcap)
        return function(*args[:place], *options, *args[place + 1 :], **kwargs)

    return for_brief


def forward_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """What a forward op was called with, which leaves out trailing defaults."""
    return Arguments(*args, **kwargs)


def backward_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Arguments, tuple[bool, ...]]:
    """What a backward op was called with: `RESULTS`, the arguments of the forward, and which of
    `OPTIONAL_GRADIENTS` are needed."""
    named = dict(zip((*RESULTS, *NAMES, *_NEEDS), args, strict=False)) | kwargs
    results = tuple(named.pop(name) for name in RESULTS)
    needs = tuple(named.pop(name, False) for name in _NEEDS)
    return results, Arguments(**named), needs


_NEEDS = tuple(f"needs_{name}" for name in OPTIONAL_GRADIENTS)


def _reference_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = forward_arguments(args, kwargs)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        check_lengths("q", call.cu_seqlens_q, call.q, call.max_seqlen_q)
        check_lengths("k", call.cu_seqlens_k, call.k, call.max_seqlen_k)
    return blockwise_forward(call)


def _reference_output(*args: Any, **kwargs: Any) -> Tensor:
    return _reference_forward(*args, **kwargs)[0]


def _reference_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    (grad_out, grad_lse, out, lse, _), call, needs = backward_arguments(args, kwargs)
    grads = blockwise_backward(grad_out, grad_lse, out, lse, call, needs)
    # An op returns tensors: an empty one stands for "no gradient".
    return tuple(grad_out.new_empty(0) if grad is None else grad for grad in grads)


def _fake_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = forward_arguments(args, kwargs)
    q = call.q
    *rows, heads, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = (heads, rows[0]) if call.packed else (rows[0], heads, rows[1])
    return _fake_output(*args, **kwargs), q.new_empty(lse_shape, dtype=lse_dtype)


def _fake_output(*args: Any, **kwargs: Any) -> Tensor:
    call = forward_arguments(args, kwargs)
    return call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1]))


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    (grad_out, *_), call, needs = backward_arguments(args, kwargs)
    needed = dict(zip(OPTIONAL_GRADIENTS, needs, strict=True))
    tensors = (getattr(call, name) if needed.get(name, True) else None for name in GRADIENTS)
    return tuple(grad_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors)


def one_by_one(
    run: Callable[..., Any], batch_size: int, in_dims: Any, arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
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
    if isinstance(results[0], Tensor):
        return torch.stack(results)[:batch_size], 0
    stacked = tuple(torch.stack(parts)[:batch_size] for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _vmap_rule(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda info, in_dims, *arguments: one_by_one(op, info.batch_size, in_dims, arguments)


_library = torch.library.Library("cute_attention", "FRAGMENT")

# What Inductor has to keep in a compiled graph: that the strides of the op's tensors have the same
# order as in eager code. Without the tag Inductor keeps the strides themselves, and it also passes
# every argument that has a default by its name, which doubles the host's time for the op.
_TAGS = (torch.Tag.needs_fixed_stride_order,)


def _define(name: str, schema: str, fake: Callable[..., Any]) -> Any:
    _library.define(f"{name}{schema}", tags=_TAGS)
    qualified = f"cute_attention::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.cute_attention, packet), overload or "default")
    torch.library.register_vmap(qualified, _vmap_rule(op), lib=_library)
    return op


def _define_family(prefix: str) -> Family:
    return Family(
        _define(f"{prefix}forward", f"({SCHEMA}) -> (Tensor out, Tensor lse)", _fake_forward),
        _define(f"{prefix}forward.output", f"({SCHEMA}) -> Tensor out", _fake_output),
        _define(f"{prefix}backward", f"({_BACKWARD}) -> ({_GRADIENTS})", _fake_backward),
    )


def _define_brief(prefix: str, inputs: str) -> Family:
    forward, output = f"({inputs}) -> (Tensor out, Tensor lse)", f"({inputs}) -> Tensor out"
    backward = f"({_RESULTS}, {inputs}) -> (Tensor dq, Tensor dk, Tensor dv)"
    return Family(
        _define(f"{prefix}forward", forward, spelled_out(_fake_forward)),
        _define(f"{prefix}forward.output", output, spelled_out(_fake_output)),
        _define(f"{prefix}backward", backward, spelled_out(lambda *a: _fake_backward(*a)[:3], 8)),
    )


KERNELS = _define_family("")
# By how many extras (arguments.py) a call has: none, or those of packed sequences.
BRIEF_KERNELS = {
    0: _define_brief("brief_", _INPUTS),
    4: _define_brief("brief_packed_", f"{_INPUTS}, {_PACKING}"),
}
REFERENCE = _define_family("reference_")
for _name, _function in (
    ("reference_forward", _reference_forward),
    ("reference_forward.output", _reference_output),
    ("reference_backward", _reference_backward),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
