"""What the operators of `scaled_dot_product_attention` and of `varlen_attn` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...semantics.dropout import draw_seed
from .. import below_autograd


class NotServed(NotImplementedError):
    """No kernel of ours serves a call. The message names the argument."""


def need_kernels(only_kernels: bool, *call: Any, **options: Any) -> None:
    if only_kernels and not below_autograd.kernels_serve(*call, **options):
        raise NotServed("no kernel of cute_attention serves this call")


def check(name: str, query: Tensor, key: Tensor, value: Tensor, heads_dim: int) -> None:
    """What PyTorch has not checked when it calls its operators, in its names."""
    for label, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name}: {label} has dtype {tensor.dtype}, expected {query.dtype} (of query)"
            )
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{name}: {label} has {tensor.dim()} dimensions, expected {query.dim()} (as query)"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{name}: key has head dim {key.shape[-1]}, expected {query.shape[-1]} (of query)"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{name}: value has shape {list(value.shape)}, expected "
            f"{[*key.shape[:-1], '*']} (as key)"
        )
    heads, heads_kv = query.shape[heads_dim], key.shape[heads_dim]
    if heads != heads_kv and (heads_kv == 0 or heads % heads_kv):
        raise ValueError(
            f"{name}: key has {heads_kv} heads, expected a number that divides the {heads} of query"
        )


def like(result: Tensor, model: Tensor) -> Tensor:
    """`result` with the strides that PyTorch's kernels give theirs: those of `model`. Compiled code
    relies on them."""
    like = torch.empty_like(model)
    return result if like.stride() == result.stride() else like.copy_(result)


def random_state(dropout_p: float, query: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """A seed from PyTorch's generator of the device, where one is needed, and what stands for it
    among the results, which have the shapes and dtypes of PyTorch's."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    seed = None
    if dropout_p > 0:
        seed = draw_seed(query.device)
        state[:1] = seed
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return seed, state.view(torch.uint64), unused


def seed_of(dropout_p: float, state: Tensor) -> Tensor | None:
    return state.view(torch.int64)[:1] if dropout_p > 0 else None
