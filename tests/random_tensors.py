"""The tensors of a random call: numbers, layouts, and NaN around whatever is not to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attention.bench.roundings import visible
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
    clean: Clean


@dataclass
class Clean:
    """What the formula reads in the place of tensors with poison: the same with zeros there."""

    tensors: list[Tensor]
    learnt: dict[str, Tensor]
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
    _change(values, call.numbers, -3, 2.0**60 if call.dtype == "bf16" else 100.0)
    unread = unread_rows(call, outer, device) if call.poison else None
    if unread is not None and call.poison == "rows":
        for value, hidden in zip(values, (unread[0], unread[1], unread[1], unread[0]), strict=True):
            poisoned(value, hidden[..., None, None])
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
            *(spread(end.to(device), call.strided_ends) for end in ends),
            *map(sum, zip(longest, call.slack, strict=True)),
        )
    learnt, options = {}, dict(call.options)
    if call.slopes:
        own = (batch, call.heads) if call.slopes == "batch heads" else (call.heads,)
        options["alibi_slopes"] = torch.randn(own, device=device).to(dtype).float() / 8
    if call.bias is not None:
        sides = longest if packed else [side[-1] for side in outer]
        bias = _bias(call, batch, sides, device)
        hidden = ~reads_of_bias(call, sides, device).sum_to_size(bias.shape).bool()
        learnt["bias"] = _laid_out_bias(poisoned(bias, hidden) if call.poison else bias, call)
    if call.sink:
        learnt["sink"] = sink_of(call, device)
    shape_lse = [call.heads, *outer[0]] if packed else [batch, call.heads, outer[0][1]]
    grad_lse = torch.randn(shape_lse, device=device)
    clean = Clean(tensors, learnt, grad_lse)
    if unread is not None:
        finite = [t.nan_to_num(0, 0, 0) for t in tensors]
        # An infinite bias stays where the poison is -inf: what is hidden adds nothing.
        given = dict(learnt)
        if "bias" in given:
            given["bias"] = given["bias"].nan_to_num(0, 0, -torch.inf)
        clean = Clean(finite, given, grad_lse)
        if not call.sink:  # the gradient of a blind row's LSE is that of its sink
            rows = unread[0] if packed else unread[0][:, None]
            grad_lse = poisoned(grad_lse.clone(), rows)
    return Made(call, tensors, learnt, options, packing, grad_lse, clean)


def unread_rows(call: Drawn, outer: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Which queries see no key, and which keys no query sees: bool `[batch, seqlen]`, packed
    `[total]`."""
    hidden = []
    for queries, keys in call.lengths if call.kind == "packed" else call.lengths[:1]:
        sees = visible(queries, keys, call.options.get("causal", False), call.options.get("window"))
        hidden.append((~sees.any(1), ~sees.any(0)))
    found = []
    for side, shape in enumerate(outer):
        rows = torch.zeros(shape, dtype=torch.bool)
        if hidden:
            values = torch.cat([pair[side] for pair in hidden])
            rows[..., : len(values)] = values
        found.append(rows.to(device))
    return found[0], found[1]


def reads_of_bias(call: Drawn, sides: list[int], device: str) -> Tensor:
    """How many heads read each number of a bias that is not broadcast, `[batch, heads, seqlen_q,
    seqlen_k]`; packed those of the longest sequences."""
    reads = torch.zeros(len(call.lengths), call.heads, *sides)
    for index, (queries, keys) in enumerate(call.lengths):
        sees = visible(queries, keys, call.options.get("causal", False), call.options.get("window"))
        reads[index, :, :queries, :keys] = sees.float()
    return reads.to(device)


def poisoned(value: Tensor, hidden: Tensor) -> Tensor:
    """`value`, with NaN and both infinities in turn where it is hidden, changed in place."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], device=value.device, dtype=value.dtype)
    turns = bad[torch.arange(value.numel(), device=value.device) % 3].view(value.shape)
    return value.copy_(torch.where(hidden, turns, value))


def sink_of(call: Drawn, device: str) -> Tensor:
    sink = torch.randn(call.heads, device=device) * 3
    if call.sink != "normal":
        sink[:: 2 if call.sink == "some" else 1] = -torch.inf
    if call.sink == "some":
        sink[1::4] = torch.inf
    return sink


def spread(numbers: Tensor, strided: bool) -> Tensor:
    """The same integers, with others between them where `strided`."""
    if not strided:
        return numbers
    wide = numbers.new_full((*numbers.shape, 2), 12345)
    return wide[..., 0].copy_(numbers)


def _change(values: list[Tensor], numbers: str, axis: int, large: float) -> None:
    """Changes standard normal q, k, v and gradient in place. `large` leaves room for gradients."""
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
    elif numbers == "large":
        v *= large
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
    if layout == "one_row" and value.dim() == 4 and value.shape[-3]:
        return value[..., -1:, :, :].expand_as(value)  # the last is the one that masks hide least
    if layout == "one_later":  # not at a multiple of 4 bytes
        wide = value.new_full((value.numel() + 1,), torch.nan)
        return wide[1:].view(value.shape).copy_(value)
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
    return value.float() if call.bias_dtype == "float32" else value


def _laid_out_bias(value: Tensor, call: Drawn) -> Tensor:
    if call.bias_layout == "keys_first" and value.dim() > 1:
        return value.mT.contiguous().mT
    if call.bias_layout in ("sliced", "odd_slice"):
        before = 8 if call.bias_layout == "sliced" else 3
        keys = value.shape[-1]
        wide = value.new_full((*value.shape[:-1], before + keys + 5 + -keys % 8), torch.nan)
        return wide[..., before : before + keys].copy_(value)
    return value
