"""What every argument of attention means: the direct formula, in plain differentiable PyTorch.

This file is the contract in executable form. It materialises every score, so it is for
understanding and for testing, not for speed; `blockwise.py` computes the same in memory linear in
the sequence length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..checks import without_gradient
from ..options import Window
from .dropout import as_seed, drop_count, keep_mask, keep_scale


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention by the direct formula.

    With query `i`, key `j`, query head `h`, kv head `g = h // (heads // heads_kv)` and
    `shift = seqlen_k - seqlen_q`:

        s[i, j] = scale * dot(q[i, h], k[j, g])
        s[i, j] = softcap * tanh(s[i, j] / softcap)                 where softcap is given
        s[i, j] = s[i, j] - slope[h] * abs(i + shift - j) + bias[i, j]
        s[i, j] = -inf                                              where query i does not see key j
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sink[h]))            the sink where it is given
        p[i, j] = exp(s[i, j] - lse[i]) * keep[i, j] * 256 / (256 - round(256 * dropout_p))
        out[i]  = sum_j p[i, j] * v[j, g]

    A causal mask is aligned to the bottom right: the last query sees every key. 1 where query i
    sees key j:

        seqlen_q 3, seqlen_k 5:  1 1 1 0 0      seqlen_q 5, seqlen_k 3:  0 0 0
                                 1 1 1 1 0                               0 0 0
                                 1 1 1 1 1                               1 0 0
                                                                         1 1 0
                                                                         1 1 1

    A row that sees no key has output 0, an LSE of -inf (of `sink` where there is one) and gradients
    0. Beside a sink of +inf keys weigh nothing: output 0, LSE +inf, and of all gradients only that
    of the LSE, which is the sink's. Keys that no query sees, and queries that see no key, are not
    read here. Kernels may multiply them by an exact 0, so that NaN there may reach other rows of
    the sequence: "NaN and infinities" in docs/design.md says what every backend promises.

    Scores and softmax are float32, or float64 where q is. Differentiable in q, k, v, bias and sink,
    through the output and the LSE, to any order.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`, any floating dtype, any strides.
        k: keys `[batch, seqlen_k, heads_kv, head_dim]`; `heads_kv` divides `heads`.
        v: values `[batch, seqlen_k, heads_kv, head_dim_v]`.
        causal: query `i` sees keys `j <= i + shift`.
        window: `(left, right)`: query `i` sees keys `i + shift - left <= j <= i + shift + right`;
            None is unbounded. With `causal`, `right` is 0.
        scale: multiplies q·k; `head_dim ** -0.5` where None.
        softcap: bounds the scaled scores to `(-softcap, softcap)`; None or 0 for no bound.
        alibi_slopes: `[heads]` or `[batch, heads]`, float32; no gradient.
        bias: broadcastable to `[batch, heads, seqlen_q, seqlen_k]`, floating; added to the scores.
        sink: `[heads]`, float32: a logit that joins the softmax's denominator only.
        dropout_p: probability of dropping a probability, rounded to 256ths; 0 draws nothing, 1
            gives zeros.
        dropout_seed: an int or an int64 tensor of one element; None draws one from PyTorch's
            generator. `dropout.py` defines the bits as a function of (seed, batch, head, i, j).
        return_lse: also return the LSE.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]` in q's dtype; with `return_lse` the pair
        `(out, lse)`, `lse [batch, heads, seqlen_q]` the natural log of the softmax's denominator,
        float32 (float64 where q is).

    Raises:
        ValueError: shapes that do not agree, a negative window, `dropout_p` outside [0, 1],
            `alibi_slopes` that require a gradient.

    Example:
        >>> import torch
        >>> from cute_attention import attention_reference
        >>> q = torch.randn(2, 16, 8, 64)
        >>> k = torch.randn(2, 32, 2, 64)
        >>> v = torch.randn(2, 32, 2, 128)
        >>> out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 8, 128]), torch.Size([2, 8, 16]))
    """
    _check("attention_reference", q, k, v, 4, window, dropout_p, alibi_slopes)
    left, right = _window_sides(causal, window)
    seed = as_seed(dropout_seed, q.device) if drop_count(dropout_p) else None
    with _without_autocast(q):
        out, lse = _dense(
            q, k, v, left, right, scale, softcap, alibi_slopes, bias, sink, dropout_p, seed, 0
        )
    return (out, lse) if return_lse else out


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences by the direct formula.

    Sequence `b` is the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q and likewise of k and
    v; it attends to itself only, exactly as `attention_reference` of its rows would, masks and
    dropout counted from its start. Reads `cu_seqlens` on the host, so it waits for the device once.
    Rows outside every sequence are not read; their output is 0, their LSE -inf and their gradients
    0. The causal mask of each sequence, here with (seqlen_q, seqlen_k) of (2, 3) and (1, 1):

        1 1 0 .
        1 1 1 .
        . . . 1

    Args:
        q: queries `[total_q, heads, head_dim]`, any floating dtype, any strides.
        k: keys `[total_k, heads_kv, head_dim]`; `heads_kv` divides `heads`.
        v: values `[total_k, heads_kv, head_dim_v]`.
        cu_seqlens_q: int32 `[batch + 1]`, non-decreasing; zero-length sequences are legal.
        cu_seqlens_k: int32 `[batch + 1]`, likewise.
        causal: as in `attention_reference`, per sequence.
        window: as in `attention_reference`, per sequence.
        scale: multiplies q·k; `head_dim ** -0.5` where None.
        softcap: bounds the scaled scores to `(-softcap, softcap)`; None or 0 for no bound.
        alibi_slopes: `[heads]` or `[batch, heads]`, float32; no gradient.
        bias: broadcastable to `[batch, heads, max_seqlen_q, max_seqlen_k]`; sequence `b` reads the
            first rows and columns of `bias[b]`, the rest is not read.
        sink: `[heads]`, float32: a logit that joins the softmax's denominator only.
        dropout_p: probability of dropping a probability, rounded to 256ths; 0 draws nothing, 1
            gives zeros.
        dropout_seed: an int or an int64 tensor of one element; None draws one from PyTorch's
            generator.
        return_lse: also return the LSE.

    Returns:
        `out [total_q, heads, head_dim_v]` in q's dtype; with `return_lse` the pair `(out, lse)`,
        `lse [heads, total_q]`, float32 (float64 where q is).

    Raises:
        ValueError: shapes that do not agree, `cu_seqlens` that decrease or leave the rows, a
            negative window, `dropout_p` outside [0, 1], `alibi_slopes` that require a gradient.

    Example:
        >>> import torch
        >>> from cute_attention import attention_varlen_reference
        >>> q = k = v = torch.randn(6, 4, 32)
        >>> cu_seqlens = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
        >>> attention_varlen_reference(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([6, 4, 32])
    """
    _check("attention_varlen_reference", q, k, v, 3, window, dropout_p, alibi_slopes)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or not len(cu_seqlens_q):
        raise ValueError(
            f"attention_varlen_reference: cu_seqlens have shapes {list(cu_seqlens_q.shape)} and "
            f"{list(cu_seqlens_k.shape)}, expected [batch + 1] for both"
        )
    if cu_seqlens_q.is_meta or cu_seqlens_k.is_meta:
        raise ValueError(
            "attention_varlen_reference: cu_seqlens are on meta, expected them on a device with "
            "values (the formula reads where each sequence starts)"
        )
    left, right = _window_sides(causal, window)
    seed = as_seed(dropout_seed, q.device) if drop_count(dropout_p) else None
    starts_q, starts_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    for label, starts, total in (("q", starts_q, q.shape[0]), ("k", starts_k, k.shape[0])):
        if sorted(starts) != starts or starts[0] < 0 or starts[-1] > total:
            raise ValueError(
                f"attention_varlen_reference: cu_seqlens_{label} is {starts}, expected numbers "
                f"from 0 to {total} (the rows of {label}) that do not decrease"
            )
    heads, head_dim_v = q.shape[1], v.shape[2]
    outs, lses = [], []
    # Zero, but part of the graph of every input even where there is no sequence.
    inputs = [t for t in (q, k, v, bias, sink) if t is not None]
    zero = torch.stack([t.reshape(-1)[:0].sum().to(compute_dtype(q)) for t in inputs]).sum()

    def gap(rows: int) -> None:
        outs.append(zero.to(q.dtype).expand(rows, heads, head_dim_v))
        lses.append((zero - torch.inf).expand(heads, rows))

    with _without_autocast(q):
        gap(starts_q[0])
        for b in range(len(starts_q) - 1):
            rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
            slopes = alibi_slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[b]
            bias_b = bias
            if bias is not None:
                lengths = (rows.stop - rows.start, keys.stop - keys.start)
                bias_b = narrow_bias(bias, (b, b + 1), *lengths)
            out, lse = _dense(
                q[None, rows], k[None, keys], v[None, keys], left, right, scale, softcap, slopes,
                bias_b, sink, dropout_p, seed, b,
            )  # fmt: skip
            outs.append(out[0])
            lses.append(lse[0])
        gap(q.shape[0] - starts_q[-1])
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _dense(
    q: Tensor,  # [batch, seqlen_q, heads, head_dim]
    k: Tensor,  # [batch, seqlen_k, heads_kv, head_dim]
    v: Tensor,  # [batch, seqlen_k, heads_kv, head_dim_v]
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    batch_start: int,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of sequences of one length; to dropout they start at `batch_start`."""
    dtype = compute_dtype(q)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    i = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=q.device)
    sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left is not None:
        sees &= j >= i - left
    if right is not None:
        sees &= j <= i + right

    # What no mask lets through is not read: 0 * NaN would otherwise reach the output.
    blind, unseen = ~sees.any(1)[:, None, None], ~sees.any(0)[:, None, None]
    queries = q.to(dtype).masked_fill(blind, 0.0)
    keys, values = k.to(dtype).masked_fill(unseen, 0.0), v.to(dtype).masked_fill(unseen, 0.0)
    groups = (heads_kv, heads // heads_kv if heads_kv else 0)
    grouped = torch.unflatten(queries, 2, groups)

    scores = torch.einsum("bigrd,bjgd->bgrij", grouped, keys).flatten(1, 2)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype)[..., :, None, None]
        scores = scores - slopes * (i - j).abs()
    if bias is not None:
        scores = scores + bias.to(dtype)
    scores = scores.masked_fill(~sees, -torch.inf)

    # The sink is one more column of the softmax; -inf where there is none. Of +inf it has all the
    # weight: exp(inf - inf) would be NaN.
    logit = scores.new_full((heads,), -torch.inf) if sink is None else sink.to(dtype)
    column = logit[:, None, None].expand(batch, heads, seqlen_q, 1)
    whole = column == torch.inf
    scores = torch.cat([scores.masked_fill(whole, -torch.inf), column.masked_fill(whole, 0.0)], -1)
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + peak).masked_fill(empty, -torch.inf)
    lse = torch.where(whole, column, lse).squeeze(-1)

    probabilities = weights[..., :-1] / total
    if seed is not None:
        first = batch_start * heads
        keep = keep_mask(
            seed, dropout_p, (first, first + batch * heads), (0, seqlen_q), (0, seqlen_k)
        )
        probabilities = probabilities.masked_fill(~keep.view_as(probabilities), 0.0)
        probabilities = probabilities * keep_scale(dropout_p)
    probabilities = torch.unflatten(probabilities, 1, groups)
    out = torch.einsum("bgrij,bjgd->bigrd", probabilities, values).flatten(2, 3)
    return out.masked_fill(blind, 0.0).to(q.dtype), lse


def _without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Nothing is cast inside; "meta" is no device of torch.autocast."""
    return nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype of scores, softmax and LSE."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def narrow_bias(bias: Tensor, batch: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """A view of what sequences `batch[0]` to `batch[1]` of these lengths read of a bias.

    The bias has up to four dimensions, broadcastable to `[batch, heads, seqlen_q, seqlen_k]`; the
    view has four, those of length 1 kept.
    """
    bias = bias[(None,) * (4 - bias.dim())]
    batch_index = slice(*batch) if bias.shape[0] > 1 else slice(None)
    row_index = slice(seqlen_q) if bias.shape[2] > 1 else slice(None)
    key_index = slice(seqlen_k) if bias.shape[3] > 1 else slice(None)
    return bias[batch_index, :, row_index, key_index]


_FARTHEST = 2**62  # no two positions are farther apart, and one plus it is still an int64


def _window_sides(causal: bool, window: Window | None) -> Window:
    left, right = (
        None if side is None else min(side, _FARTHEST) for side in window or (None, None)
    )
    return left, (0 if causal else right)


def _check(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dims: int,
    window: Window | None,
    dropout_p: float,
    alibi_slopes: Tensor | None,
) -> None:
    """Raise ValueError where shapes do not agree; `dims` is 4 for dense tensors, 3 for packed."""
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != dims:
            raise ValueError(
                f"{name}: {label} has shape {list(tensor.shape)}, expected {dims} dimensions"
            )
    if k.shape[-1] != q.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{name}: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}: "
            "head_dim of q and k must agree, and all but head_dim_v of k and v"
        )
    if dims == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"{name}: q has batch {q.shape[0]}, k has batch {k.shape[0]}")
    if q.shape[-2] % k.shape[-2] if k.shape[-2] else q.shape[-2]:
        raise ValueError(
            f"{name}: q has {q.shape[-2]} heads, expected a multiple of k's {k.shape[-2]}"
        )
    if window is not None and any(side is not None and side < 0 for side in window):
        raise ValueError(f"{name}: window is {window}, expected no negative side")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{name}: dropout_p is {dropout_p}, expected 0 <= dropout_p <= 1")
    if alibi_slopes is not None:
        without_gradient(name, alibi_slopes)
