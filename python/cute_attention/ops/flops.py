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

from ..arguments import Arguments
from .schema import backward_arguments, forward_arguments, spelled_out


def _pairs(call: Arguments) -> int:
    """Query-key pairs of one head, over the whole batch."""
    offsets_q, offsets_k = call.cu_seqlens_q, call.cu_seqlens_k
    if offsets_q is None or offsets_k is None or _is_hollow(offsets_q):
        return call.batch * call.seqlen_q * call.seqlen_k
    lengths = zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True)
    return sum(length_q * length_k for length_q, length_k in lengths)


def _is_hollow(tensor: Tensor) -> bool:
    """Whether the tensor has no values to read."""
    return type(tensor) is not Tensor or tensor.is_meta


def _forward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = forward_arguments(args, kwargs)
    return 2 * _pairs(call) * call.q.shape[-2] * (call.q.shape[-1] + call.v.shape[-1])


def _backward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    _, call, _ = backward_arguments(args, kwargs)
    # Of head_dim: scores again, dq, dk. Of head_dim_v: dp, dv.
    products = 3 * call.q.shape[-1] + 2 * call.v.shape[-1]
    return 2 * _pairs(call) * call.q.shape[-2] * products


_OPS = torch.ops.cute_attention
for _prefix in ("", "reference_"):
    register_flop_formula(getattr(_OPS, f"{_prefix}forward"), get_raw=True)(_forward)
    register_flop_formula(getattr(_OPS, f"{_prefix}backward"), get_raw=True)(_backward)
for _prefix in ("brief_", "brief_packed_"):
    register_flop_formula(getattr(_OPS, f"{_prefix}forward"), get_raw=True)(spelled_out(_forward))
    register_flop_formula(getattr(_OPS, f"{_prefix}backward"), get_raw=True)(
        spelled_out(_backward, 8)
    )
