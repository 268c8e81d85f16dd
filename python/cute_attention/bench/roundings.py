"""Exact attention in float64, and how large an error the roundings to 16 bits can explain.

A fused kernel rounds to the dtype in few places: the probabilities before they multiply v, the
derivatives of the scores before they multiply k and q, the output that the backward reads, and each
result. For every element of every result, `exact` also computes a `size`: the root of the sum of
the squares of the element itself and of all terms that a kernel rounds on the way to it. An error
of a few eps(dtype) * size is rounding; a wrong row, tile or factor makes an error of hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attention.semantics.dropout import as_seed, drop_count, keep_mask, keep_scale

NAMES = ("out", "lse", "dq", "dk", "dv")
# How many roundings an error may be. Emulated on thousands of inputs, kernels stay below 1.4, and
# below 9 ulps of fp32 for the LSE. Tensor cores may need more: they add in an order and a precision
# that an emulation does not know.
LIMITS = {"out": 3.0, "lse": 64.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dbias": 3.0, "dsink": 3.0}
# The relative error of a probability, in ulps of fp32 for each unit of its score. It comes from the
# sum that makes the score, its product with the scale, and the subtraction of the maximum or LSE.
SCORE_ULPS = 4.0
# The relative error of a score under softcap, at most: kernels compute it by a polynomial near 0,
# and by an exponential and a quotient elsewhere (core/capped_softmax.h, core/softcap.h). The scores
# of the backward may differ from those of the forward's LSE by as much.
SOFTCAP_ERROR = 6.5e-6
# Probabilities below this may be 0: hardware often flushes denormal fp32 numbers to zero.
NOTHING = 2.0**-100
# A float32 below its smallest normal number is flushed to zero: hardware's exp2 does it to a
# probability. The error is then the probability itself, however small the result is: a gradient of
# a float32 bias shows it.
FLUSHED = 2.0**-126


@dataclass(frozen=True)
class Exact:
    """The float64 results by name, and their sizes: one rounding is an error of eps(dtype) *
    size."""

    values: dict[str, Tensor]
    sizes: dict[str, Tensor]
    eps: dict[str, float]

    def roundings(self, name: str, result: Tensor) -> Tensor:
        """The largest error of each batch entry in roundings, [batch]; infinite where a finite
        value is expected and the result has none. What is itself infinite or no number in float64
        is not compared."""
        expected = self.values[name]
        if result.shape != expected.shape:
            raise ValueError(f"shape is {list(result.shape)}, expected {list(expected.shape)}")
        kind = torch.finfo(result.dtype)
        smallest = max(kind.smallest_normal * kind.eps, NOTHING * kind.eps)
        error = (result.detach().double() - expected).abs()
        share = error / (self.eps[name] * self.sizes[name] + smallest)
        share = share.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return share.masked_fill(~expected.isfinite(), 0.0).flatten(1).amax(1)


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int | None, int | None] | None
) -> Tensor:
    """bool [seqlen_q, seqlen_k], True where a query sees a key, as docs/design.md defines it."""
    left, right = window or (None, None)
    right = (0 if right is None else min(right, 0)) if causal else right
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        sees &= key >= position - left
    if right is not None:
        sees &= key <= position + right
    return sees


def exact(
    q: Tensor,  # [batch, seqlen_q, heads, head_dim]
    k: Tensor,  # [batch, seqlen_k, heads_kv, head_dim]
    v: Tensor,  # [batch, seqlen_k, heads_kv, head_dim_v]
    grad_out: Tensor,  # [batch, seqlen_q, heads, head_dim_v]
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,  # broadcastable to [batch, heads, seqlen_q, seqlen_k]
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # [heads]
    grad_lse: Tensor | None = None,  # [batch, heads, seqlen_q]
    batch_start: int = 0,
) -> Exact:
    """The formula's output, LSE and gradients in float64, from inputs that are rounded already, and
    the size of each. There are those of the bias, of its shape before it is broadcast, and of the
    sink where these are given. To dropout the first sequence is number `batch_start`."""
    dtype, heads, heads_kv = q.dtype, q.shape[2], k.shape[2]
    group, scale = heads // heads_kv, q.shape[3] ** -0.5 if scale is None else scale
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    q, k, v, grad_out = (t.detach().double().transpose(1, 2) for t in (q, k, v, grad_out))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def turned(t: Tensor) -> Tensor:
        return t.transpose(1, 2)

    def alike(axis: int, *tensors: Tensor) -> bool:  # copies of the first along an axis
        return all(torch.equal(t, t.narrow(axis, 0, 1).expand_as(t)) for t in tensors)

    def nearly_alike(axis: int, t: Tensor) -> bool:  # but for roundings of float64
        return torch.allclose(t, t.narrow(axis, 0, 1).expand_as(t), rtol=1e-6, atol=0.0)

    def alike_or_nothing(axis: int, t: Tensor) -> bool:  # as the largest, or next to it nothing
        largest = t.gather(axis, t.abs().argmax(axis, keepdim=True))
        far = torch.minimum(t.abs(), (t - largest).abs())
        return bool((far <= 1e-6 * largest.abs()).all())

    def grouped(t: Tensor) -> Tensor:  # sums over the query heads of each KV head
        return turned(t.unflatten(1, (heads_kv, group)).sum(2))

    scores = q @ k.mT * scale
    bend = torch.ones((), dtype=scores.dtype, device=scores.device)
    bent_size = bend.new_zeros(())  # of what softcap leaves
    raw_error = bend_error = bend.new_zeros(())  # of the score that is bent, and relative of bend
    if softcap:
        bent = torch.tanh(scores / softcap)
        # A score is a sum over the head dim: where its terms cancel, its error is that of terms.
        raw_size = abs(scale) * (q.square() @ k.square().mT).sqrt() + scores.abs()
        raw_error = SCORE_ULPS * eps32 / eps * raw_size.nan_to_num(0.0, 0.0, 0.0)
        bend_error = 2 * bent.abs() * raw_error / softcap  # d ln(1 - tanh^2(x)) = -2 tanh(x) dx
        scores, bend = softcap * bent, 1 - bent.square()
        bent_size = scores.abs()
        del bent, raw_size
    biases = torch.zeros((), dtype=scores.dtype, device=scores.device)
    if alibi_slopes is not None:
        positions = torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])
        distances = (positions[:, None] - torch.arange(k.shape[2], device=q.device)).abs()
        biases = -alibi_slopes.double()[..., None, None] * distances
    if bias is not None:
        biases = biases + bias.double()
    scores = scores + biases
    biases = biases.masked_fill(biases == -torch.inf, 0.0)  # what it hides adds no error
    sees = visible(q.shape[2], k.shape[2], causal, window).to(q.device)
    scores = scores.masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    del scores
    kept = torch.ones((), dtype=p.dtype, device=p.device)  # what dropout multiplies P by
    ds_unit = 1.0  # kernels round dS of dropout before they multiply it (core/keep_scale.h)
    if drop_count(dropout_p):
        first = batch_start * heads
        ranges = (first, first + p.shape[0] * heads), (0, p.shape[2]), (0, p.shape[3])
        mask = keep_mask(as_seed(dropout_seed, p.device), dropout_p, *ranges)
        kept = mask.view(p.shape) * keep_scale(dropout_p)
        ds_unit = max(keep_scale(dropout_p), 1.0)  # 1 where nothing is kept
    out, dp = (kept * p) @ v, kept * (grad_out @ v.mT)
    delta = (grad_out * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.double()[..., None]
    unbent = p * (dp - delta)
    ds = unbent * bend
    slope = (bend * (dp - delta)).abs()  # of dS by P
    del dp
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, (kept * p).mT @ grad_out
    values = (turned(out), lse, turned(dq), grouped(dk), grouped(dv))

    scale = abs(scale)  # sizes have no sign
    # The sizes by which errors are divided. The error of a number below the smallest normal number
    # of the dtype does not shrink with the number, so such sizes have a floor. A probability so
    # small that it underflows to 0 contributes nothing.
    score_size = lse.nan_to_num(0.0, 0.0, 0.0).abs()[..., None] + biases.abs()
    score_error = (SCORE_ULPS * eps32 * score_size + SOFTCAP_ERROR * bent_size) / eps
    score_error = score_error + bend * raw_error
    factor, floor = 1.0 + score_error, max(torch.finfo(dtype).smallest_normal, NOTHING)
    counts = p > NOTHING**2
    p2 = ((p * factor + floor) * counts * kept).square()
    # Errors of different heads, sequences and queries are independent: their squares add up. Copies
    # have the same errors, which add up themselves.
    many = {"rows": 1, "group": 1, "all": 1, "keys": 1, "grad_rows": 1}
    if q.numel() and k.numel():
        same_dp = alike(2, v) or not grad_out.any()
        many["keys"] = k.shape[2] if same_dp and alike(2, k) else 1
        # Queries that differ have the same output where all keys are alike: of the same gradient,
        # too, they have the same error of delta.
        outs = out.unflatten(1, (heads_kv, group))
        # Where one key has all the weight, dropout leaves some rows nothing.
        same_rows = alike(2, grad_out) and (alike_or_nothing(3, outs) or alike(2, q))
        many["rows"] = q.shape[2] if same_rows else 1
        # Queries that differ may have the same probabilities, by slopes or a softcap that is
        # reached. What their errors are multiplied with is then the same.
        many["grad_rows"] = q.shape[2] if alike(2, grad_out) else 1
        same_heads = alike(1, grad_out) and (nearly_alike(2, outs) or alike(1, q))
        many["group"] = group if same_heads else 1
        many["all"] = heads if alike(1, q, k, v, grad_out) else many["group"]
        many["all"] *= q.shape[0] if alike(0, q, k, v, grad_out) else 1
    of_group = many["rows"] * many["group"]
    # A score is a sum over the head dim: where its terms cancel, it is less than what is rounded.
    terms = scale * (q.square() @ k.square().mT).sqrt()
    terms = bend * terms + biases.abs() + SOFTCAP_ERROR / (LIMITS["lse"] * eps32) * bent_size
    lse_size = lse.abs().clamp_min(1.0) + (p * terms).nan_to_num(0.0).sum(-1)
    del terms, bent_size
    largest = torch.nn.functional.pad(factor, (1, 0), value=1.0).amax(-1, keepdim=True)
    out_size = (p2 @ v.square()).sqrt() + largest * out.abs()
    delta_size = (grad_out * out_size).square().sum(-1, keepdim=True).sqrt() + delta.abs()
    slipped = p * bend  # the factor by which an error of delta goes into dS
    # The derivative 1 - tanh^2, computed in fp32, is off by some ulps of 1. What is rounded is dS
    # with the error of delta: it is not small where dP and delta cancel.
    slope_error = SCORE_ULPS * eps32 / eps if softcap else 0.0
    ds_size = ds.abs() * (factor + bend_error) + unbent.abs() * slope_error
    ds_size += eps * slipped * delta_size
    ds2 = ((ds_size + ds_unit * floor * slope.clamp_min(1.0)) * counts).square()
    # Below the smallest normal number all roundings may go one way, as where all become 0.
    lost = ds.sign() * ds.abs().clamp_max(ds_unit * floor * eps) / eps
    lost.masked_fill_(ds.abs() >= ds_unit * floor, 0.0)
    dq_size = scale * (many["keys"] * ds2 @ k.square()).sqrt() + dq.abs()
    # One error that all keys of a row have: that of delta, and, of copies of a key, of 1 - tanh^2.
    dq_size += scale * (delta_size * (slipped @ k).abs() + slope_error * (unbent @ k).abs())
    dq_size += scale * (lost @ k).abs()
    dk2 = scale**2 * (ds2 + (slipped * delta_size).square()).mT @ q.square()
    dv2 = p2.mT @ grad_out.square()
    dk_lost = scale * grouped(lost.mT @ q).abs()
    sizes = (
        turned(out_size),
        lse_size,
        turned(dq_size),
        (of_group * grouped(dk2)).sqrt() + values[3].abs() + dk_lost,
        (many["grad_rows"] * many["group"] * grouped(dv2)).sqrt() + values[4].abs(),
    )
    units = {name: eps32 if name == "lse" else eps for name in NAMES}
    found = dict(zip(NAMES, values, strict=True)), dict(zip(NAMES, sizes, strict=True)), units
    if bias is not None:
        flushed = unbent.abs() * (FLUSHED / p).clamp_max(1.0) / eps
        added2 = (unbent.abs() * factor + p * delta_size + flushed).square()
        added2 = added2.sum_to_size(bias.shape)
        found[0]["dbias"] = unbent.sum_to_size(bias.shape)
        rows = many["rows"] if bias.shape[-2:-1] in ((), (1,)) else 1
        keys = many["keys"] if bias.shape[-1:] in ((), (1,)) else 1
        found[1]["dbias"] = (rows * keys * many["all"] * added2).sqrt() + found[0]["dbias"].abs()
        units["dbias"] = eps
    if sink is not None:
        logits = sink.double()[:, None]
        share = (logits - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        share = share.masked_fill(logits == torch.inf, 1.0)  # it has all the weight
        found[0]["dsink"] = -(share * delta[..., 0]).sum((0, 2))
        flushed = share.clamp_max(FLUSHED) * delta[..., 0].abs() / eps
        dsink2 = (share * delta_size[..., 0]).square().sum((0, 2))
        found[1]["dsink"] = (many["rows"] * many["all"] * dsink2).sqrt() + flushed.sum((0, 2))
        units["dsink"] = eps
    return Exact(*found)
