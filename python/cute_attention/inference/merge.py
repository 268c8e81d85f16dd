"""`merge_attention`: attention to all keys from attention to parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..checks import type_name

_NAME = "merge_attention"


def merge_attention(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """The output and LSE of attention to all keys, from those of parts of the keys.

    With `w_p = exp(lse_p - lse)`, where `lse = log(sum over parts of exp(lse_p))`, the output is
    the sum of `w_p * out_p`. Differentiable in all outs and lses. A part that sees no key in a row
    has an LSE of -inf there; its output in that row is not read and may be anything. A row that no
    part sees has output 0, LSE -inf and gradients 0. A sink belongs to one part only. A part whose
    LSE is +inf, as that of a sink of +inf is, has all the weight; several share it equally.

    Args:
        outs: of each part `[batch, seqlen_q, heads, head_dim_v]`, packed `[total_q, heads,
            head_dim_v]`; a list of tensors, or one tensor whose first dimension is the parts.
        lses: of each part `[batch, heads, seqlen_q]`, packed `[heads, total_q]`, as `attention`
            returns them.

    Returns:
        `(out, lse)` of these shapes: out in the dtype of outs, lse float32 (float64 where outs or
        lses are). Sums are taken in the dtype of the LSE.

    Raises:
        TypeError: something that is no tensor, or dtypes that differ.
        ValueError: no part, or shapes or devices that do not agree.

    Example:
        >>> import torch
        >>> from cute_attention import attention
        >>> from cute_attention.inference import merge_attention
        >>> q, k, v = torch.randn(3, 1, 8, 2, 16).unbind()
        >>> parts = [attention(q, k[:, s], v[:, s], return_lse=True)
        ...          for s in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge_attention(*zip(*parts))
        >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
        True
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    _check(outs, lses)
    dtype = torch.promote_types(torch.promote_types(lses[0].dtype, outs[0].dtype), torch.float32)
    logs = [lse.to(dtype) for lse in lses]
    peak = logs[0].detach()
    for log in logs[1:]:
        peak = torch.maximum(peak, log.detach())
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    infinite = peak == torch.inf
    # In an empty row neither the value nor the gradient may come from exp(-inf), and where a part
    # has all the weight none from exp(inf - inf).
    empty = [(log == -torch.inf) | (infinite & (log != torch.inf)) for log in logs]
    weights = [
        torch.exp(
            log.masked_fill(none | infinite, 0.0) - peak.masked_fill(none | infinite, 0.0)
        ).masked_fill(none, 0.0)
        for log, none in zip(logs, empty, strict=True)
    ]
    total = sum(weights[1:], weights[0])
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    out: Tensor | None = None
    for part, weight, none in zip(outs, weights, empty, strict=True):
        values = part.to(dtype).masked_fill(_beside(none), 0.0)
        term = _beside(weight / total) * values
        out = term if out is None else out + term
    assert out is not None
    lse = (peak + total.log()).masked_fill(blind, -torch.inf)
    if any(log.requires_grad for log in logs):  # nothing above passes on the gradient of +inf
        shares = [torch.where(log == torch.inf, log / total.detach(), 0.0) for log in logs]
        lse = torch.where(infinite, sum(shares[1:], shares[0]), lse)
    return out.to(outs[0].dtype), lse


def _beside(rows: Tensor) -> Tensor:
    """`[..., heads, seqlen]` as `[..., seqlen, heads, 1]`."""
    return rows.transpose(-1, -2)[..., None]


def _parts(label: str, values: object) -> list[Tensor]:
    is_scalar = isinstance(values, Tensor) and not values.dim()
    if is_scalar or not isinstance(values, Iterable):
        kind = f"{type_name(values)}{' without dimensions' if is_scalar else ''}"
        raise TypeError(f"{_NAME}: {label} is {kind}, expected a list of tensors, or one tensor")
    return list(values)


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"{_NAME}: outs has {len(outs)} parts and lses has {len(lses)}, expected as many of "
            "both, at least one"
        )
    for label, tensors in (("outs", outs), ("lses", lses)):
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{_NAME}: {label}[{index}] is {type_name(tensor)}, expected a torch.Tensor"
                )
            if tensor.dtype != tensors[0].dtype or not tensor.is_floating_point():
                raise TypeError(
                    f"{_NAME}: {label}[{index}] has dtype {tensor.dtype}, expected a floating one, "
                    "the same in all parts"
                )
            if tensor.device != outs[0].device:
                raise ValueError(
                    f"{_NAME}: {label}[{index}] is on {tensor.device}, expected {outs[0].device}"
                )
    shape = outs[0].shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"{_NAME}: outs[0] has shape {list(shape)}, expected [batch, seqlen_q, heads, "
            "head_dim_v] or packed [total_q, heads, head_dim_v]"
        )
    *batch, rows, heads, _ = shape
    for label, tensors, wanted in (
        ("outs", outs, list(shape)),
        ("lses", lses, [*batch, heads, rows]),
    ):
        for index, tensor in enumerate(tensors):
            if list(tensor.shape) != wanted:
                raise ValueError(
                    f"{_NAME}: {label}[{index}] has shape {list(tensor.shape)}, expected {wanted}"
                )
