"""The `reference` backend: attention and its gradient, tile by tile, in linear memory.

Forward is the online softmax over blocks of keys; backward recomputes each tile's probabilities
from the LSE. Both are plain functions over tensors, with no autograd inside, on any device. Tiles
that the mask hides are skipped, and what no tile covers (keys that no query sees, packed rows
outside every sequence) is not read. Kernels promise less: "NaN and infinities" in docs/design.md.
Results are bitwise repeatable.

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

from ..arguments import OPTIONAL_GRADIENTS, Arguments
from .dropout import drop_count, keep_scale
from .formula import compute_dtype, narrow_bias
from .online import log_sum, with_sink
from .tiles import Sequences, Tiles, batch_of_tile, bias_tile, exp_, pack, split_bias_heads, unpack


@torch.no_grad()
def blockwise_forward(call: Arguments) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention, as `formula.py` defines them.

    Args:
        call: the arguments. Floating dtypes and strides may be any. Packed calls read their
            cu_seqlens on the host; dropout_seed is not read where dropout_p drops nothing.

    Returns:
        `out` like q with v's head dim, contiguous, in q's dtype; `lse` `[batch, heads, seqlen_q]`,
        packed `[heads, total_q]`, float32 (float64 where q is).
    """
    q = call.q
    out = q.new_zeros(*q.shape[:-1], call.v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if call.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_full(lse_shape, -torch.inf, dtype=compute_dtype(q))
    with torch.autocast(q.device.type, enabled=False):
        for piece in _pieces(call):
            sequences = _sequences(piece, call)
            _forward_piece(sequences, piece.queries(out), piece.lse(lse), call.sink)
    return out, lse


@torch.no_grad()
def blockwise_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: Arguments,
    needs: tuple[bool, ...] = (False,) * len(OPTIONAL_GRADIENTS),
) -> tuple[Tensor | None, ...]:
    """Gradients of `blockwise_forward`, from its arguments, its results and the gradients of these.

    Args:
        grad_out: like `out`, any strides.
        grad_lse: like `lse`; None counts as zeros.
        out: the output of `blockwise_forward`, or of any kernel.
        lse: the LSE that came with it.
        call: as in `blockwise_forward`.
        needs: whether to compute the gradient of each of `OPTIONAL_GRADIENTS`: of bias and sink.

    Returns:
        `(dq, dk, dv, dbias, dsink)`, each with the shape and dtype of its tensor, contiguous; dbias
        and dsink are None where not needed.
    """
    q, k, v, bias, sink = call.q, call.k, call.v, call.bias, call.sink
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dtype = compute_dtype(q)
    needs_bias, needs_sink = needs
    dbias = dsink = None
    if needs_bias and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    if needs_sink and sink is not None:
        dsink = torch.zeros(sink.shape, dtype=dtype, device=sink.device)
    with torch.autocast(q.device.type, enabled=False):
        for piece in _pieces(call):
            sequences = _sequences(piece, call)
            saved = _saved(sequences, piece, grad_out, grad_lse, out, lse)
            if dsink is not None and sink is not None:
                dsink.sub_(_sink_grad(sequences, saved, sink))
            grads = _backward_piece(sequences, saved, None if dbias is None else piece.bias(dbias))
            grads[0].mul_(call.scale)
            for whole, part in zip((dq, dk, dv), grads, strict=True):
                view = piece.queries(whole) if whole is dq else piece.keys(whole)
                group = sequences.group if whole is dq else 1
                torch.unflatten(view, 2, (sequences.heads_kv, group)).copy_(
                    unpack(part, sequences.batch, group)
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


def _pieces(call: Arguments) -> Iterator[_Piece]:
    """A dense batch in pieces that fill a tile; packed tensors sequence by sequence; nothing where
    there is no head."""
    q, cu_seqlens_q, cu_seqlens_k = call.q, call.cu_seqlens_q, call.cu_seqlens_k
    if not q.shape[-2]:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = call.k.shape[1]
        step = batch_of_tile(seqlen_q, seqlen_k, heads, q.is_cuda)
        for b in range(0, batch, step):
            yield _Piece((b, min(b + step, batch)), None, None, seqlen_q, seqlen_k)
        return
    starts_q, starts_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = (starts_q[b], starts_q[b + 1]), (starts_k[b], starts_k[b + 1])
        yield _Piece((b, b + 1), rows, keys, rows[1] - rows[0], keys[1] - keys[0])


def _sequences(piece: _Piece, call: Arguments) -> Sequences:
    q, bias, slopes = call.q, call.bias, call.alibi_slopes
    dtype = compute_dtype(q)
    heads, heads_kv = q.shape[-2], call.k.shape[-2]
    batch = piece.batch[1] - piece.batch[0]
    if slopes is not None:
        slopes = slopes if slopes.dim() == 1 else slopes[slice(*piece.batch)]
        slopes = slopes.to(dtype).reshape(-1, heads_kv, 1, heads // heads_kv, 1)
    return Sequences(
        tiles=Tiles.of(call, piece.seqlen_q, piece.seqlen_k, batch * heads),
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        q=pack(piece.queries(q), heads_kv, dtype) * (call.scale / (call.softcap or 1.0)),
        k=pack(piece.keys(call.k), heads_kv, dtype),
        v=pack(piece.keys(call.v), heads_kv, dtype),
        softcap=call.softcap,
        slopes=slopes,
        bias=None if bias is None else split_bias_heads(piece.bias(bias), heads_kv),
        dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed if drop_count(call.dropout_p) else None,
        first_batch_head=piece.batch[0] * heads,
    )


def _sink_rows(sequences: Sequences, sink: Tensor) -> Tensor:
    """The logit of each row's sink, `[batch * heads_kv, seqlen_q * group, 1]`."""
    shape = (sequences.batch, sequences.heads_kv, sequences.tiles.seqlen_q, sequences.group)
    logits = sink.to(sequences.q.dtype).view(sequences.heads_kv, 1, sequences.group)
    return logits.expand(shape).reshape(*sequences.q.shape[:2], 1)


def _forward_piece(sequences: Sequences, out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    """Fill `out [batch, seqlen_q, heads, head_dim_v]` and `lse [batch, heads, seqlen_q]`."""
    q, group, heads_kv = sequences.q, sequences.group, sequences.heads_kv
    # The running maximum starts at a finite value: -inf - -inf would be NaN in rows without keys.
    peak = q.new_full((*q.shape[:2], 1), torch.finfo(q.dtype).min)
    total = torch.zeros_like(peak)
    if sink is not None:
        peak, total = with_sink(peak, _sink_rows(sequences, sink))
    buffer = sequences.buffer()
    outs = torch.unflatten(out, 2, (heads_kv, group))
    for i0, i1 in sequences.tiles.row_blocks():
        row_peak, row_total = sequences.rows(peak, i0, i1), sequences.rows(total, i0, i1)
        acc = q.new_zeros(q.shape[0], (i1 - i0) * group, out.shape[-1])
        for j0, j1 in sequences.tiles.col_blocks(i0, i1):
            scores, _ = sequences.scores(i0, i1, j0, j1, buffer)
            new_peak = torch.maximum(row_peak, scores.amax(-1, keepdim=True))
            shrink = torch.exp(row_peak - new_peak)
            weights = exp_(scores.sub_(new_peak))
            row_total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            row_peak.copy_(new_peak)
            keep = sequences.kept(i0, i1, j0, j1)
            if keep is not None:
                weights.mul_(keep)
            acc.mul_(shrink).baddbmm_(weights, sequences.v[:, j0:j1])
        acc.div_(row_total.masked_fill(row_total == 0, 1.0))
        if sequences.dropout_seed is not None:
            acc.mul_(keep_scale(sequences.dropout_p))
        outs[:, i0:i1].copy_(unpack(acc, sequences.batch, group))
    log_total = unpack(log_sum(peak, total), sequences.batch, group).flatten(2)
    lse.copy_(log_total.transpose(1, 2))


@dataclass
class _Saved:
    """What the backward reads of the forward's results, packed like the queries of `Sequences`."""

    grad_out: Tensor  # [batch * heads_kv, seqlen_q * group, head_dim_v], times dropout's scale
    lse: Tensor  # [batch * heads_kv, seqlen_q * group, 1]; 0 where a row has no key
    delta: Tensor  # [batch * heads_kv, seqlen_q * group, 1]; 0 where a row has no key


def _saved(
    sequences: Sequences,
    piece: _Piece,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> _Saved:
    heads_kv, dtype = sequences.heads_kv, sequences.q.dtype

    def pack_rows(rows: Tensor) -> Tensor:  # [batch, heads, seqlen_q]
        return pack(rows.transpose(1, 2)[..., None], heads_kv, dtype)

    packed_lse = pack_rows(piece.lse(lse))
    delta = torch.zeros_like(packed_lse)
    packed_grad = pack(piece.queries(grad_out), heads_kv, dtype)
    rows = sequences.tiles.sighted()
    sighted_grad = sequences.rows(packed_grad, *rows)
    sighted_out = sequences.rows(pack(piece.queries(out), heads_kv, dtype), *rows)
    sequences.rows(delta, *rows).copy_((sighted_grad * sighted_out).sum(-1, keepdim=True))
    if grad_lse is not None:
        delta.sub_(pack_rows(piece.lse(grad_lse)))
    empty = packed_lse == -torch.inf
    if sequences.dropout_seed is not None:
        packed_grad = packed_grad * keep_scale(sequences.dropout_p)
    return _Saved(
        grad_out=packed_grad,
        lse=packed_lse.masked_fill(empty, 0.0),
        delta=delta.masked_fill_(empty, 0.0),
    )


def _sink_grad(sequences: Sequences, saved: _Saved, sink: Tensor) -> Tensor:
    """Minus the gradient of `sink`, `[heads]`."""
    logits = _sink_rows(sequences, sink)
    share = torch.exp(logits - saved.lse).masked_fill_(logits == torch.inf, 1.0).mul_(saved.delta)
    return unpack(share, sequences.batch, sequences.group).sum((0, 1)).flatten()


def _backward_piece(
    sequences: Sequences, saved: _Saved, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed dq (still to be multiplied by the scale), dk and dv; adds to the view `dbias`."""
    q, k, v = sequences.q, sequences.k, sequences.v
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    split_dbias = None if dbias is None else split_bias_heads(dbias, sequences.heads_kv)
    buffers = sequences.buffer(), sequences.buffer()
    for i0, i1 in sequences.tiles.row_blocks():
        q_rows, dq_rows, grad, lse, delta = (
            sequences.rows(t, i0, i1) for t in (q, dq, saved.grad_out, saved.lse, saved.delta)
        )
        for j0, j1 in sequences.tiles.col_blocks(i0, i1):
            scores, tanh = sequences.scores(i0, i1, j0, j1, buffers[0], keep_tanh=True)
            weights = exp_(scores.sub_(lse))
            dweights = sequences.product(grad, v[:, j0:j1], buffers[1])
            keep = sequences.kept(i0, i1, j0, j1)
            if keep is None:
                dv[:, j0:j1].baddbmm_(weights.transpose(1, 2), grad)
            else:
                dv[:, j0:j1].baddbmm_((weights * keep).transpose(1, 2), grad)
                dweights.mul_(keep)
            dscores = dweights.sub_(delta).mul_(weights)
            if split_dbias is not None:
                part = bias_tile(split_dbias, i0, i1, j0, j1)
                part.add_(sequences.split(dscores).sum_to_size(part.shape))
            if tanh is not None:
                dscores.mul_(tanh.square_().neg_().add_(1.0))
            dq_rows.baddbmm_(dscores, k[:, j0:j1])
            dk[:, j0:j1].baddbmm_(dscores.transpose(1, 2), q_rows)
    if sequences.softcap:
        dk.mul_(sequences.softcap)  # q carries scale / softcap
    return dq, dk, dv
