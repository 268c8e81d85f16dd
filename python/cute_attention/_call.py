"""From checked tensors to the op that runs: options, backend, autograd.

All of this runs at every call. Checks, choice and bookkeeping take 9 us of host time, autograd 10
us more where it is needed (one core of an AMD EPYC, torch 2.13, for an op that does nothing).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _check
from .backend import check_name, requested_backend, select_forward
from .dropout import as_seed
from .ops import AttentionFunction, Call, Tensors, TransformedAttention, run_forward
from .survey import Features, holds, specialized


class Options(NamedTuple):
    """The keyword arguments of `attention` and `attention_varlen`, in their order, unchecked."""

    causal: Any
    window: Any
    scale: Any
    softcap: Any
    alibi_slopes: Any
    bias: Any
    sink: Any
    dropout_p: Any
    dropout_seed: Any
    deterministic: Any
    return_lse: Any
    backend: Any


def autocasts(q: Tensor) -> bool:
    """Whether torch.autocast is on for q's device."""
    kind = q.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Casts what torch.autocast casts for PyTorch's own attention: floating tensors but float64."""
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _check.DTYPES - {torch.float64}:
            return value.to(dtype)
        return value

    return cast(q), cast(k), cast(v), cast(bias)


def check_options(name: str, q: Tensor, shape: _check.Shape, options: Options) -> _check.Sides:
    """Raise for the first option that is wrong; returns the sides of the window."""
    causal, window, scale, softcap, slopes, bias, sink, dropout_p, seed, *rest = options
    deterministic, return_lse, backend = rest
    if not (type(causal) is bool and type(deterministic) is bool and type(return_lse) is bool):
        _check.flags(name, causal=causal, deterministic=deterministic, return_lse=return_lse)
    if scale is not None:
        _check.number(name, "scale", scale)
    if softcap is not None:
        _check.softcap(name, softcap)
    if slopes is not None:
        _check.alibi_slopes(name, slopes, q, shape.batch)
    if bias is not None:
        _check.bias(name, bias, q, (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k))
    if sink is not None:
        _check.sink(name, sink, q)
    if seed is not None or type(dropout_p) is not float or dropout_p != 0.0:
        _check.dropout(name, dropout_p, seed, q)
    if backend != "auto":
        check_name(name, "backend", backend)
    return _check.window_sides(name, causal, window)


def without_numpy(options: Options) -> Options | None:
    """The options with Python numbers for NumPy scalars; None where there is no such scalar."""
    window = options.window
    sides = window if isinstance(window, (tuple, list)) else ()
    if not any(_check.plain(value) is not value for value in (*options, *sides)):
        return None
    plain_window = [_check.plain(side) for side in sides] if sides else window
    return Options(*map(_check.plain, options._replace(window=plain_window)))


def features_of(options: Options, sides: _check.Sides, packed: bool) -> Features:
    """What checked options ask of a kernel."""
    return Features(
        holds(sides[0] >= 0),
        holds(sides[1] >= 0),
        packed,
        options.softcap is not None and holds(options.softcap > 0),
        options.bias is not None,
        options.alibi_slopes is not None,
        options.sink is not None,
        holds(options.dropout_p > 0),
        options.scale is not None and not holds(options.scale > 0),
    )


def attend(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor | None, Tensor | None],
    shape: _check.Shape,
    options: Options,
) -> Any:
    """`attention` or `attention_varlen` of q, k, v and cu_seqlens that are checked."""
    q, k, v = tensors
    try:
        sides = check_options(name, q, shape, options)
    except TypeError:  # only then, so that ordinary calls take no time to look for NumPy scalars
        if (plain := without_numpy(options)) is None:
            raise
        options, sides = plain, check_options(name, q, shape, plain)
    features = features_of(options, sides, offsets[0] is not None)
    requested = requested_backend(options.backend)
    head_dim, head_dim_v = specialized(shape.head_dim), specialized(shape.head_dim_v)
    call = Call(
        select_forward(q.dtype, head_dim, head_dim_v, features, q.device, requested),
        requested,
        shape.seqlen_q,
        shape.seqlen_k,
        head_dim**-0.5 if options.scale is None else options.scale,
        options.softcap or 0.0,
        *sides,
        options.dropout_p if features.dropout else 0.0,
        options.deterministic,
        options.return_lse,
        features,
    )
    bias = options.bias
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    seed = as_seed(options.dropout_seed, q.device) if features.dropout else None
    inputs = Tensors(q, k, v, *offsets, bias, options.alibi_slopes, options.sink, seed)
    out, lse = _function(call, inputs)
    return (out, lse) if options.return_lse else out


def _function(call: Call, inputs: Tensors) -> tuple[Tensor, Tensor]:
    """The op, with autograd attached where it is needed."""
    q, k, v, _, _, bias, _, sink, _ = inputs
    if torch.compiler.is_compiling():
        if _needs_gradient(q, k, v, bias, sink):
            # Dynamo refuses a tensor that comes twice, as in attention(x, x, x).
            views = [t if t is None else t.view_as(t) for t in inputs]
            return AttentionFunction.apply(call, *views)
    elif torch._C._are_functorch_transforms_active():
        return TransformedAttention.apply(call, *inputs)
    # Inside a dual_level, the Function is what refuses forward-mode AD.
    elif _needs_gradient(q, k, v, bias, sink) or forward_ad._current_level >= 0:
        return AttentionFunction.apply(call, *inputs)
    return run_forward(call, inputs)


def _needs_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
