"""The `reference` backend: attention and its gradient, tile by tile, in linear memory.

Forward is the online softmax over blocks of keys; backward recomputes each tile's probabilities
from the LSE. Both are plain functions over tensors, with no autograd inside, on any device. Tiles
that the mask hides are skipped, and what no tile covers (keys that no query sees, packed rows
outside every sequence) is not read. Results are bitwise repeatable.

P comes from the LSE, and an LSE of 40 is known to 2e-6 in float32: that much of every P.
A dense call never waits for the device, so a CUDA graph can capture it. A varlen call reads
`cu_seqlens` on the host once.

With dO and dlse the gradients of output and LSE, P the probabilities, and D dropout's mask times
its scale, so that O = (P * D) V:

    delta = rowsum(dO * O) - dlse     dP = D * (dO V^T)      dS = P * (dP - delta)
    dV = (P * D)^T dO                 dQ = scale * dS K      dK = scale * dS^T Q
    dbias = dS summed over what was broadcast                dsink = -sum(exp(sink - lse) * delta)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._blockwise_tiles import (
    AttentionSpec,
    Problem,
    Tiles,
    batch_of_tile,
    bias_tile,
    exp_,
    pack,
    split_bias_heads,
    unpack,
)
from .dropout import drop_count, keep_scale
from .reference import compute_dtype, narrow_bias

__all__ = ["AttentionSpec", "blockwise_backward", "blockwise_forward"]


@torch.no_grad()
def blockwise_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention, as `reference.py` defines them.

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, or packed `[total_q, heads, head_dim]`; any
            floating dtype, any strides.
        k: `[batch, seqlen_k, heads_kv, head_dim]`, or packed.
        v: `[batch, seqlen_k, heads_kv, head_dim_v]`, or packed.
        cu_seqlens_q: `[batch + 1]` where packed, else None.
        cu_seqlens_k: `[batch + 1]` where packed, else None.
        bias: broadcastable to `[batch, heads, seqlen_q, seqlen_k]` (packed: the longest ones).
        alibi_slopes: `[heads]` or `[batch, heads]`.
        sink: `[heads]`.
        dropout_seed: int64, one element, on q's device; not read where `spec.dropout_p` drops
            nothing.
        spec: everything that is not a tensor.

    Returns:
        `out` like q with v's head dim, contiguous, in q's dtype; `lse` `[batch, heads, seqlen_q]`,
        packed `[heads, total_q]`, float32 (float64 where q is).
    """
    dtype = compute_dtype(q)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse = q.new_full(lse_shape, -torch.inf, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        for piece in _pieces(q, k, cu_seqlens_q, cu_seqlens_k):
            problem = _problem(piece, q, k, v, bias, alibi_slopes, dropout_seed, spec)
            _forward_piece(problem, piece.queries(out), piece.lse(lse), sink)
    return out, lse


@torch.no_grad()
def blockwise_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
    needs_bias: bool = False,
    needs_sink: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `blockwise_forward`, from its inputs, its results and the gradients of these.

    Args:
        grad_out: like `out`, any strides.
        grad_lse: like `lse`; None counts as zeros.
        q: as given to `blockwise_forward`, like all that are not listed.
        k: likewise.
        v: likewise.
        out: the output of `blockwise_forward`, or of any kernel.
        lse: the LSE that came with it.
        cu_seqlens_q: as in `blockwise_forward`.
        cu_seqlens_k: as in `blockwise_forward`.
        bias: as in `blockwise_forward`.
        alibi_slopes: as in `blockwise_forward`.
        sink: as in `blockwise_forward`.
        dropout_seed: as in `blockwise_forward`.
        spec: as in `blockwise_forward`.
        needs_bias: compute the gradient of `bias`.
        needs_sink: compute the gradient of `sink`.

    Returns:
        `(dq, dk, dv, dbias, dsink)`, each with the shape and dtype of its tensor, contiguous; dbias
        and dsink are None where not needed.
    """
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dtype = compute_dtype(q)
    dbias = dsink = None
    if needs_bias and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    if needs_sink and sink is not None:
        dsink = torch.zeros(sink.shape, dtype=dtype, device=sink.device)
    with torch.autocast(q.device.type, enabled=False):
        for piece in _pieces(q, k, cu_seqlens_q, cu_seqlens_k):
            problem = _problem(piece, q, k, v, bias, alibi_slopes, dropout_seed, spec)
            saved = _saved(problem, piece, grad_out, grad_lse, out, lse)
            if dsink is not None and sink is not None:
                dsink.sub_(_sink_grad(problem, saved, sink))
            grads = _backward_piece(problem, saved, None if dbias is None else piece.bias(dbias))
            grads[0].mul_(spec.scale)
            for whole, part in zip((dq, dk, dv), grads, strict=True):
                view = piece.queries(whole) if whole is dq else piece.keys(whole)
                group = problem.group if whole is dq else 1
                torch.unflatten(view, 2, (problem.heads_kv, group)).copy_(
                    unpack(part, problem.batch, group)
                )
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    if dsink is not None and sink is not None:
        dsink = dsink.to(sink.dtype)
    return dq, dk, dv, dbias, dsink


@dataclass(frozen=True)
class _Piece:
    """Consecutive sequences of one length that are computed together."""

    batch: tuple[int, int]
    queries_packed: tuple[int, int] | None  # rows of one sequence; None where dense
    keys_packed: tuple[int, int] | None
    seqlen_q: int
    seqlen_k: int

    def queries(self, tensor: Tensor) -> Tensor:
        """`[batch, seqlen_q, heads, dim]`, a view."""
        return self._rows(tensor, self.queries_packed)

    def keys(self, tensor: Tensor) -> Tensor:
        """`[batch, seqlen_k, heads_kv, dim]`, a view."""
        return self._rows(tensor, self.keys_packed)

    def lse(self, lse: Tensor) -> Tensor:
        """`[batch, heads, seqlen_q]`, a view."""
        if self.queries_packed is None:
            return lse[slice(*self.batch)]
        return lse[None, :, slice(*self.queries_packed)]

    def bias(self, bias: Tensor) -> Tensor:
        """`[batch | 1, heads | 1, seqlen_q | 1, seqlen_k | 1]`, a view."""
        return narrow_bias(bias, self.batch, self.seqlen_q, self.seqlen_k)

    def _rows(self, tensor: Tensor, packed: tuple[int, int] | None) -> Tensor:
        return tensor[slice(*self.batch)] if packed is None else tensor[None, slice(*packed)]


def _pieces(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Iterator[_Piece]:
    """A dense batch in pieces that fill a tile; packed tensors sequence by sequence; nothing where
    there is no head."""
    if not q.shape[-2]:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = k.shape[1]
        step = batch_of_tile(seqlen_q, seqlen_k, heads, q.is_cuda)
        for b in range(0, batch, step):
            yield _Piece((b, min(b + step, batch)), None, None, seqlen_q, seqlen_k)
        return
    starts_q, starts_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = (starts_q[b], starts_q[b + 1]), (starts_k[b], starts_k[b + 1])
        yield _Piece((b, b + 1), rows, keys, rows[1] - rows[0], keys[1] - keys[0])


def _problem(
    piece: _Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    spec: AttentionSpec,
) -> Problem:
    dtype = compute_dtype(q)
    heads, heads_kv = q.shape[-2], k.shape[-2]
    batch = piece.batch[1] - piece.batch[0]
    tiles = Tiles.of(spec, piece.seqlen_q, piece.seqlen_k, batch * heads, q.is_cuda)
    slopes = None
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[slice(*piece.batch)]
        slopes = slopes.to(dtype).reshape(-1, heads_kv, 1, heads // heads_kv, 1)
    return Problem(
        tiles=tiles,
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        q=pack(piece.queries(q), heads_kv, dtype) * (spec.scale / (spec.softcap or 1.0)),
        k=pack(piece.keys(k), heads_kv, dtype),
        v=pack(piece.keys(v), heads_kv, dtype),
        softcap=spec.softcap,
        slopes=slopes,
        bias=None if bias is None else split_bias_heads(piece.bias(bias), heads_kv),
        dropout_p=spec.dropout_p,
        dropout_seed=dropout_seed if drop_count(spec.dropout_p) else None,
        first_batch_head=piece.batch[0] * heads,
    )


def _sink_rows(problem: Problem, sink: Tensor) -> Tensor:
    """The logit of each row's sink, `[batch * heads_kv, seqlen_q * group, 1]`."""
    shape = (problem.batch, problem.heads_kv, problem.tiles.seqlen_q, problem.group)
    logits = sink.to(problem.q.dtype).view(problem.heads_kv, 1, problem.group)
    return logits.expand(shape).reshape(*problem.q.shape[:2], 1)


def _forward_piece(problem: Problem, out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    """Fill `out [batch, seqlen_q, heads, head_dim_v]` and `lse [batch, heads, seqlen_q]`."""
    q, group, heads_kv = problem.q, problem.group, problem.heads_kv
    # The running maximum starts at a finite value: -inf - -inf would be NaN in rows without keys.
    peak = q.new_full((*q.shape[:2], 1), torch.finfo(q.dtype).min)
    total = torch.zeros_like(peak)
    if sink is not None:
        logits = _sink_rows(problem, sink)
        peak = torch.maximum(peak, logits)
        total = torch.exp(logits - peak)
    buffer = problem.buffer()
    outs = torch.unflatten(out, 2, (heads_kv, group))
    for i0, i1 in problem.tiles.row_blocks():
        row_peak, row_total = problem.rows(peak, i0, i1), problem.rows(total, i0, i1)
        acc = q.new_zeros(q.shape[0], (i1 - i0) * group, out.shape[-1])
        for j0, j1 in problem.tiles.col_blocks(i0, i1):
            scores, _ = problem.scores(i0, i1, j0, j1, buffer)
            new_peak = torch.maximum(row_peak, scores.amax(-1, keepdim=True))
            shrink = torch.exp(row_peak - new_peak)
            weights = exp_(scores.sub_(new_peak))
            row_total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            row_peak.copy_(new_peak)
            keep = problem.kept(i0, i1, j0, j1)
            if keep is not None:
                weights.mul_(keep)
            acc.mul_(shrink).baddbmm_(weights, problem.v[:, j0:j1])
        acc.div_(row_total.masked_fill(row_total == 0, 1.0))
        if problem.dropout_seed is not None:
            acc.mul_(keep_scale(problem.dropout_p))
        outs[:, i0:i1].copy_(unpack(acc, problem.batch, group))
    log_total = unpack(peak + total.log(), problem.batch, group).flatten(2)
    lse.copy_(log_total.transpose(1, 2))


@dataclass
class _Saved:
    """What the backward reads of the forward's results, packed like the problem's queries."""

    grad_out: Tensor  # [batch * heads_kv, seqlen_q * group, head_dim_v], times dropout's scale
    lse: Tensor  # [batch * heads_kv, seqlen_q * group, 1]; 0 where a row has no key
    delta: Tensor  # [batch * heads_kv, seqlen_q * group, 1]; 0 where a row has no key


def _saved(
    problem: Problem,
    piece: _Piece,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> _Saved:
    heads_kv, dtype = problem.heads_kv, problem.q.dtype

    def pack_rows(rows: Tensor) -> Tensor:  # [batch, heads, seqlen_q]
        return pack(rows.transpose(1, 2)[..., None], heads_kv, dtype)

    packed_lse = pack_rows(piece.lse(lse))
    delta = torch.zeros_like(packed_lse)
    packed_grad = pack(piece.queries(grad_out), heads_kv, dtype)
    rows = problem.tiles.sighted()
    sighted_grad = problem.rows(packed_grad, *rows)
    sighted_out = problem.rows(pack(piece.queries(out), heads_kv, dtype), *rows)
    problem.rows(delta, *rows).copy_((sighted_grad * sighted_out).sum(-1, keepdim=True))
    if grad_lse is not None:
        delta.sub_(pack_rows(piece.lse(grad_lse)))
    empty = packed_lse == -torch.inf
    if problem.dropout_seed is not None:
        packed_grad = packed_grad * keep_scale(problem.dropout_p)
    return _Saved(
        grad_out=packed_grad,
        lse=packed_lse.masked_fill(empty, 0.0),
        delta=delta.masked_fill_(empty, 0.0),
    )


def _sink_grad(problem: Problem, saved: _Saved, sink: Tensor) -> Tensor:
    """Minus the gradient of `sink`, `[heads]`."""
    share = torch.exp(_sink_rows(problem, sink) - saved.lse).mul_(saved.delta)
    return unpack(share, problem.batch, problem.group).sum((0, 1)).flatten()


def _backward_piece(
    problem: Problem, saved: _Saved, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed dq (still to be multiplied by the scale), dk and dv; adds to the view `dbias`."""
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    split_dbias = None if dbias is None else split_bias_heads(dbias, problem.heads_kv)
    buffers = problem.buffer(), problem.buffer()
    for i0, i1 in problem.tiles.row_blocks():
        q_rows, dq_rows, grad, lse, delta = (
            problem.rows(t, i0, i1) for t in (q, dq, saved.grad_out, saved.lse, saved.delta)
        )
        for j0, j1 in problem.tiles.col_blocks(i0, i1):
            scores, tanh = problem.scores(i0, i1, j0, j1, buffers[0], keep_tanh=True)
            weights = exp_(scores.sub_(lse))
            dweights = problem.product(grad, v[:, j0:j1], buffers[1])
            keep = problem.kept(i0, i1, j0, j1)
            if keep is None:
                dv[:, j0:j1].baddbmm_(weights.transpose(1, 2), grad)
            else:
                dv[:, j0:j1].baddbmm_((weights * keep).transpose(1, 2), grad)
                dweights.mul_(keep)
            dscores = dweights.sub_(delta).mul_(weights)
            if split_dbias is not None:
                part = bias_tile(split_dbias, i0, i1, j0, j1)
                part.add_(problem.split(dscores).sum_to_size(part.shape))
            if tanh is not None:
                dscores.mul_(tanh.square_().neg_().add_(1.0))
            dq_rows.baddbmm_(dscores, k[:, j0:j1])
            dk[:, j0:j1].baddbmm_(dscores.transpose(1, 2), q_rows)
    if problem.softcap:
        dk.mul_(problem.softcap)  # q carries scale / softcap
    return dq, dk, dv
