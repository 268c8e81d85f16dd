"""Attention whose bits for one query depend on nothing but that query and the keys that it sees.

`blockwise.py` chooses its tiles by the lengths of a call, so a query's sums are added up in another
order where its prompt comes in other chunks, or where more keys follow. Here each query is computed
alone, over blocks of keys whose borders are multiples of `BLOCK` tokens from the start of its
sequence, and each block is filled up to `BLOCK`. So a query makes the same calls on operands of the
same shapes and strides whatever lies around it, and what a mask hides enters them as an exact 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Arguments
from .formula import compute_dtype
from .online import log_sum, with_sink
from .tiles import exp_

BLOCK = 256


@torch.no_grad()
def invariant_forward(call: Arguments, begin: int) -> tuple[Tensor, Tensor]:
    """Output and LSE of one sequence, as `formula.py` defines them.

    Args:
        call: dense, of batch 1, without a bias and dropout; slopes are `[heads]`.
        begin: the place of the first key in its sequence. The blocks are counted from place 0.

    Returns:
        `out [1, seqlen_q, heads, head_dim_v]` in q's dtype, and `lse [1, heads, seqlen_q]`.
    """
    q, dtype = call.q[0], compute_dtype(call.q)
    rows, heads = q.shape[:2]
    heads_kv = call.k.shape[2]
    out = q.new_zeros(1, rows, heads, call.v.shape[-1])
    lse = q.new_full((1, heads, rows), -torch.inf, dtype=dtype)
    if not heads:
        return out, lse
    keys, values = (_blocks(t[0], begin, dtype) for t in (call.k, call.v))
    end = begin + call.k.shape[1]
    for row in range(rows):
        place = end - rows + row
        first, last = begin, end
        if call.window_left >= 0:
            first = max(first, place - call.window_left)
        if call.window_right >= 0:
            last = min(last, place + call.window_right + 1)
        query = q[row].to(dtype) * (call.scale / (call.softcap or 1.0))
        grouped = query.reshape(heads_kv, heads // heads_kv, -1)
        result, denominator = _attend(call, grouped, keys, values, place, (first, last), begin)
        out[0, row] = result.flatten(0, 1)
        lse[0, :, row] = denominator.flatten()
    return out, lse


def _blocks(tokens: Tensor, begin: int, dtype: torch.dtype) -> Tensor:
    """`[length, heads_kv, dim]` as `[blocks, heads_kv, BLOCK, dim]`, zeros where there is none."""
    before = begin % BLOCK
    length, heads_kv, dim = tokens.shape
    blocks = tokens.new_zeros(-(-(before + length) // BLOCK), heads_kv, BLOCK, dim, dtype=dtype)
    flat = blocks.transpose(1, 2)  # (blocks, BLOCK, heads_kv, dim)
    for index in range(blocks.shape[0]):
        first = max(0, index * BLOCK - before)
        last = min(length, (index + 1) * BLOCK - before)
        place = first + before - index * BLOCK
        flat[index, place : place + last - first] = tokens[first:last]
    return blocks


def _attend(
    call: Arguments,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    place: int,
    sees: tuple[int, int],
    begin: int,
) -> tuple[Tensor, Tensor]:
    """Output `[heads_kv, group, head_dim_v]` and LSE `[heads_kv, group, 1]` of one query, which
    sees the keys from `sees[0]` to before `sees[1]`."""
    peak = query.new_full((*query.shape[:2], 1), torch.finfo(query.dtype).min)
    total = torch.zeros_like(peak)
    if call.sink is not None:
        peak, total = with_sink(peak, call.sink.to(query.dtype).reshape(peak.shape))
    acc = query.new_zeros(*query.shape[:2], values.shape[-1])
    first, last = sees
    for number in range(first // BLOCK, -(-last // BLOCK) if first < last else 0):
        index = number - begin // BLOCK
        j = torch.arange(number * BLOCK, (number + 1) * BLOCK, device=query.device)
        hidden = (j < first) | (j >= last)
        scores = torch.bmm(query, keys[index].transpose(1, 2))
        if call.softcap:
            scores = scores.tanh_().mul_(call.softcap)
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes.to(query.dtype).reshape(peak.shape)
            scores = scores - slopes * (place - j).abs().to(query.dtype)
        scores = scores.masked_fill(hidden, -torch.inf)
        highest = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shrink = torch.exp(peak - highest)
        weights = exp_(scores - highest)
        total = total * shrink + weights.sum(-1, keepdim=True)
        visible = values[index].masked_fill(hidden[:, None], 0.0)
        acc = acc * shrink + torch.bmm(weights, visible)
        peak = highest
    out = acc / total.masked_fill(total == 0, 1.0)
    return out, log_sum(peak, total)
