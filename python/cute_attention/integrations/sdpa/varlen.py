"""PyTorch's operators of `varlen_attn` and nested tensors: packed [total, heads, head_dim] or dense
[batch, seqlen, heads, head_dim]; causal from the bottom right, as here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import below_autograd
from .shared import NotServed, check, like, need_kernels, random_state, seed_of

_VARLEN = "varlen_attn"


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # a hint, and changes no result
    only_kernels: bool,
) -> tuple[Any, ...]:
    refused = {
        "return_debug_mask": return_debug_mask or None,
        "seqused_k": seqused_k,
        "block_table": block_table,
    }
    for label, value_of in refused.items():
        if value_of is not None:
            raise NotServed(f"{_VARLEN}: {label} is not served by cute_attention")
    call = _flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    options = _flash_options(is_causal, scale, window_size_left, window_size_right, dropout_p)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    need_kernels(only_kernels, *call, **options)
    seed, state, unused = random_state(dropout_p, query)
    out, lse = below_autograd.forward(*call, **options, dropout_seed=seed)
    return like(out, query), lse, state, unused, query.new_empty(0)


def flash_into(
    out: Tensor, *args: Any, only_kernels: bool, **options: Any
) -> Tensor:  # varlen_attn_out
    result, lse, *_ = flash(*args, **options, only_kernels=only_kernels)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    only_kernels: bool,
) -> tuple[Tensor, ...]:
    call = _flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    options = _flash_options(is_causal, scale, window_size_left, window_size_right, dropout_p)
    need_kernels(only_kernels, *call, **options)
    grads = below_autograd.gradients(
        *call,
        grad_out=grad_out,
        out=out.contiguous(),
        lse=logsumexp.contiguous(),
        **options,
        dropout_seed=seed_of(dropout_p, rng_state),
    )
    models = {"q": query, "k": key, "v": value}
    return tuple(like(grads[name], model) for name, model in models.items())


def _flash_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> tuple[Any, ...]:
    """The name of our function, q, k and v, and how they are packed."""
    check(_VARLEN, query, key, value, -2)
    if cum_seq_q is None:
        return "attention", query, key, value, ()
    offsets = []
    for label, tensor in (("cu_seq_q", cum_seq_q), ("cu_seq_k", cum_seq_k)):
        if tensor is None or tensor.dtype != torch.int32:
            came = "None" if tensor is None else f"of dtype {tensor.dtype}"
            raise TypeError(f"{_VARLEN}: {label} is {came}, expected a tensor of torch.int32")
        offsets.append(tensor)
    return "attention_varlen", query, key, value, (*offsets, max_q, max_k)


def _flash_options(
    is_causal: bool,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
) -> dict[str, Any]:
    sides = [None if side is None or side < 0 else side for side in (window_left, window_right)]
    return {"causal": is_causal, "scale": scale, "window": tuple(sides), "dropout_p": dropout_p}
