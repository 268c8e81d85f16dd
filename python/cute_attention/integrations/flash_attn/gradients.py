"""Gradients of a call from its output and LSE, which need not be those of one call of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checked import checked
from ...checks import tensors
from ...options import with_defaults
from ..below_autograd import gradients_of


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, ...],
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attention`, or of `attention_varlen` where there is a packing.

    Keys may be a part of those that `out` and `lse` come from, as in ring attention: then dq is the
    part that these keys give.

    Args:
        q: queries.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        grad_out: the gradient of `out`, and like it.
        out: the output.
        lse: its LSE, float32 `[batch, heads, seqlen_q]`, packed `[heads, total_q]`.
        options: those of the forward that differ from their defaults.
    """
    name = "attention_varlen" if packing else "attention"
    given = with_defaults(name, options)
    call = checked(name, q, k, v, packing, given, options)
    tensors(name, dout=grad_out, out=out, softmax_lse=lse)
    rows = list(q.shape[:-1])
    heads_first = [rows[1], rows[0]] if packing else [rows[0], rows[2], rows[1]]
    for label, tensor, shape in (
        ("dout", grad_out, [*rows, v.shape[-1]]),
        ("out", out, [*rows, v.shape[-1]]),
        ("softmax_lse", lse, heads_first),
    ):
        if list(tensor.shape) != shape:
            raise ValueError(f"{name}: {label} has shape {list(tensor.shape)}, expected {shape}")
    grads = gradients_of(name, call, given, grad_out, out.contiguous(), lse.contiguous())
    return grads["q"], grads["k"], grads["v"]


@torch.no_grad()
def row_sums(grad_out: Tensor, out: Tensor, rounded_to: int = 1) -> Tensor:
    """The sum of grad_out * out over the head dim, which flash-attn calls softmax_d: float32
    `[batch, heads, seqlen_q]`, packed `[heads, total_q]`, with zeros up to a multiple of
    `rounded_to` rows."""
    sums = (grad_out.float() * out.float()).sum(-1).movedim(-1, -2)
    missing = -sums.shape[-1] % rounded_to
    whole = sums.new_zeros(*sums.shape[:-1], sums.shape[-1] + missing)
    whole[..., : sums.shape[-1]] = sums
    return whole
