"""The tensors of a random call: numbers, layouts, and NaN around whatever is not to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from every_row import DTYPES
from random_calls import Drawn


@dataclass
class Made:
    """The tensors of a call, and its options with those that are tensors."""

    drawn: Drawn
    tensors: list[Tensor]  # q, k, v and the gradient of the output
    learnt: dict[str, Tensor]  # bias and sink
    options: dict[str, Any]
    packing: tuple[Any, ...]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    grad_lse: Tensor


def make(call: Drawn, device: str) -> Made:
    """The tensors of a dense or packed call."""
    torch.manual_seed(call.seed)
    dtype = DTYPES[call.dtype]
    batch = len(call.lengths)
    packed = call.kind == "packed"
    if packed:
        totals = [sum(pair[side] for pair in call.lengths) for side in (0, 1)]
        outer = [[total + call.padding] for total in totals]
    else:
        outer = [[batch, side] for side in (call.lengths[0] if batch else (5, 7))]
    longest = [max((pair[side] for pair in call.lengths), default=0) for side in (0, 1)]
    shapes = (
        [*outer[0], call.heads, call.dim],
        [*outer[1], call.heads_kv, call.dim],
        [*outer[1], call.heads_kv, call.dim_v],
        [*outer[0], call.heads, call.dim_v],
    )
    values = [torch.randn(shape, device=device) for shape in shapes]
    _change(values, call.numbers, -3)
    if packed:
        for value, total in zip(values, (totals[0], totals[1], totals[1], totals[0]), strict=True):
            value[total:] = torch.nan
    tensors = [
        laid_out(value.to(dtype), layout)
        for value, layout in zip(values, call.layouts, strict=True)
    ]
    packing: tuple[Any, ...] = ()
    if packed:
        ends = [torch.tensor([0, *(p[s] for p in call.lengths)]).cumsum(0).int() for s in (0, 1)]
        packing = (
            *(end.to(device) for end in ends),
            *map(sum, zip(longest, call.slack, strict=True)),
        )
    learnt, options = {}, dict(call.options)
    if call.slopes:
        own = (batch, call.heads) if call.slopes == "batch heads" else (call.heads,)
        options["alibi_slopes"] = torch.randn(own, device=device).to(dtype).float() / 8
    if call.bias is not None:
        learnt["bias"] = _bias(call, batch, longest if packed else [s[-1] for s in outer], device)
    if call.sink:
        learnt["sink"] = torch.randn(call.heads, device=device) * 3
    shape_lse = [call.heads, *outer[0]] if packed else [batch, call.heads, outer[0][1]]
    return Made(call, tensors, learnt, options, packing, torch.randn(shape_lse, device=device))


def _change(values: list[Tensor], numbers: str, axis: int) -> None:
    """Changes standard normal q, k, v and gradient in place."""
    q, k, v, grad = values
    if numbers == "wide":
        q *= 10
    elif numbers == "huge":
        q *= 100
        k *= 30
    elif numbers == "constant":
        for each in (q, k, v):
            each.fill_(0.5)
    elif numbers == "tiny":
        q *= 1e-4
        k *= 1e-3
        grad *= 1e-2
    elif numbers == "one_key" and k.numel():  # nearly all of each row's weight is at one key
        key = k.shape[axis] // 3
        k.select(axis, key)[:] = 6.0
        q += 1.5
    elif numbers == "shifted":
        k += 20
    elif numbers == "zero":
        q.zero_()
    elif numbers == "outliers":
        q[torch.rand_like(q) < 0.01] *= 50
        v[torch.rand_like(v) < 0.01] *= 200
    elif numbers == "growing" and k.numel():  # the maximum grows along the keys, or back
        ramp = torch.linspace(-8, 8, k.shape[axis], device=k.device)
        k += ramp[:, None, None] / k.shape[-1] ** 0.5
        q += 1


def laid_out(value: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; what lies between them is NaN."""
    if layout == "heads_first":
        return value.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout in ("sliced", "odd_slice"):
        before = 8 if layout == "sliced" else 3
        *outer, rows, heads, dim = value.shape
        wide = value.new_full((*outer, rows + 2, heads + 1, dim + 16), torch.nan)
        view = wide[..., 1 : rows + 1, :heads, before : before + dim]
        return view.copy_(value)
    if layout == "one_batch" and value.dim() == 4:
        return value[:1].expand_as(value)
    if layout == "one_head":
        return value[..., :1, :].expand_as(value)
    if layout == "every_other":
        *outer, rows, heads, dim = value.shape
        wide = value.new_full((*outer, 2 * rows, heads, dim), torch.nan)
        return wide[..., ::2, :, :].copy_(value)
    if layout == "columns_apart":
        return value.mT.contiguous().mT
    return value


def _bias(call: Drawn, batch: int, longest: list[int], device: str) -> Tensor:
    axes = call.bias.split() if call.bias else []
    sizes = {"b": batch, "h": call.heads, "q": longest[0], "k": longest[1]}
    shape = [size if axis in axes else 1 for axis, size in sizes.items()]
    first = next((place for place, axis in enumerate(sizes) if axis in axes), 3)
    value = torch.randn(shape[first:], device=device) * 2
    if call.hidden == "some":
        value[torch.rand_like(value) < 0.2] = -torch.inf
    elif call.hidden == "rows" and value.dim() > 1 and value.shape[-2] > 1:
        value[..., value.shape[-2] // 2 :, :] = -torch.inf
    value = value.to(DTYPES[call.dtype])
    if call.bias_dtype == "float32":
        value = value.float()
    if call.bias_layout == "keys_first" and value.dim() > 1:
        return value.mT.contiguous().mT
    if call.bias_layout in ("sliced", "odd_slice"):
        before = 8 if call.bias_layout == "sliced" else 3
        keys = value.shape[-1]
        wide = value.new_full((*value.shape[:-1], before + keys + 5 + -keys % 8), torch.nan)
        return wide[..., before : before + keys].copy_(value)
    return value
