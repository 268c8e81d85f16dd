"""FLOP formulas for torch.utils.flop_counter.

As for PyTorch's own attention: two matrix products forward (2 * (head_dim + head_dim_v) for each
query, key and head) and five backward, whatever the mask: causal and windowed calls count as dense
ones. Packed sequences count by their own lengths, or, where cu_seqlens has no values (fake
tensors), as if each were the longest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import ops  # noqa: F401  defines the ops


def _pairs(
    q: Tensor, k: Tensor, offsets: tuple[Tensor | None, Tensor | None], longest: tuple[int, int]
) -> int:
    """Query-key pairs of one head, over the whole batch."""
    offsets_q, offsets_k = offsets
    if offsets_q is None or offsets_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if type(offsets_q) is not Tensor or offsets_q.is_meta:
        return (offsets_q.shape[0] - 1) * longest[0] * longest[1]
    lengths = zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True)
    return sum(length_q * length_k for length_q, length_k in lengths)


def _forward(args: tuple[Any, ...], longest: tuple[int, int]) -> int:
    q, k, v, cu_seqlens_q, cu_seqlens_k = args[:5]
    pairs = _pairs(q, k, (cu_seqlens_q, cu_seqlens_k), longest)
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


def _reference_forward(*args: Any, out_val: Any = None, **_: Any) -> int:
    return _forward(args, args[9:11])


def _backward(args: tuple[Any, ...], longest: tuple[int, int]) -> int:
    q, k, v, cu_seqlens_q, cu_seqlens_k = args[2], args[3], args[4], args[7], args[8]
    pairs = _pairs(q, k, (cu_seqlens_q, cu_seqlens_k), longest)
    # Of head_dim: scores again, dq, dk. Of head_dim_v: dp, dv.
    return 2 * pairs * q.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _reference_backward(*args: Any, out_val: Any = None, **_: Any) -> int:
    return _backward(args, args[13:15])


def _kernel_forward(*args: Any, out_val: Any = None, **_: Any) -> int:
    return _forward(args, args[5:7])


def _kernel_backward(*args: Any, out_val: Any = None, **_: Any) -> int:
    return _backward(args, args[9:11])


_OPS = torch.ops.cute_attention
register_flop_formula(_OPS.reference_forward, get_raw=True)(_reference_forward)
register_flop_formula(_OPS.reference_backward, get_raw=True)(_reference_backward)
register_flop_formula(_OPS.forward, get_raw=True)(_kernel_forward)
register_flop_formula(_OPS.backward, get_raw=True)(_kernel_backward)
