"""The table of wrong calls: what is wrong, the type of the error and its message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def dense(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """The arguments of a call that is right but for `changes`: batch 2, 4 x 6, 8 heads of 2, 16."""
    shapes = {"q": (2, 4, 8, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16)}
    tensors: dict[str, Any] = {name: torch.ones(shape) for name, shape in shapes.items()}
    return {name: move(value, device) for name, value in (tensors | changes).items()}


def packed(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """Likewise for packed sequences of (3, 1) queries and (2, 4) keys."""
    arguments = {
        "q": torch.ones(4, 8, 16),
        "k": torch.ones(6, 2, 16),
        "v": torch.ones(6, 2, 16),
        "cu_seqlens_q": offsets(0, 3, 4),
        "cu_seqlens_k": offsets(0, 2, 6),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return {name: move(value, device) for name, value in (arguments | changes).items()}


def move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def ones(*shape: int, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Wrong:
    """A wrong call; `changes` are made when the test runs."""

    id: str
    error: type[Exception]
    message: str  # how it starts; DEVICE is that of q
    changes: Callable[[], dict[str, Any]]


def half() -> torch.dtype:
    return torch.float16


DENSE = [
    Wrong("q-none", TypeError, "q is None, expected a torch.Tensor", lambda: {"q": None}),
    Wrong("k-list", TypeError, "k is a list, expected a torch.Tensor", lambda: {"k": [1.0]}),
    Wrong(
        "v-numpy",
        TypeError,
        "v is a numpy.ndarray, expected a torch.Tensor",
        lambda: {"v": ones(2, 6, 2, 16).numpy()},
    ),
    Wrong(
        "q-rank",
        ValueError,
        "q has shape [4, 8, 16], expected 4 dimensions [batch, seqlen, heads, head_dim]",
        lambda: {"q": ones(4, 8, 16)},
    ),
    Wrong(
        "v-rank",
        ValueError,
        "v has shape [2, 6, 2, 16, 1], expected 4 dimensions [batch, seqlen, heads, head_dim]",
        lambda: {"v": ones(2, 6, 2, 16, 1)},
    ),
    Wrong(
        "head-dim",
        ValueError,
        "k has shape [2, 6, 2, 24], expected [2, *, 2, 16] (head_dim must match q)",
        lambda: {"k": ones(2, 6, 2, 24)},
    ),
    Wrong(
        "batch",
        ValueError,
        "k has shape [3, 6, 2, 16], expected [2, *, 2, 16] (batch must match q)",
        lambda: {"k": ones(3, 6, 2, 16), "v": ones(3, 6, 2, 16)},
    ),
    Wrong(
        "v-seqlen",
        ValueError,
        "v has shape [2, 7, 2, 16], expected [2, 6, 2, *] "
        "(batch, seqlen_k and heads_kv must match k)",
        lambda: {"v": ones(2, 7, 2, 16)},
    ),
    Wrong(
        "v-heads",
        ValueError,
        "v has shape [2, 6, 4, 16], expected [2, 6, 2, *] "
        "(batch, seqlen_k and heads_kv must match k)",
        lambda: {"v": ones(2, 6, 4, 16)},
    ),
    Wrong(
        "heads-divide",
        ValueError,
        "q has 8 heads and k has 3, expected heads_kv to divide heads "
        "(query head h reads kv head h // (heads // heads_kv))",
        lambda: {"k": ones(2, 6, 3, 16), "v": ones(2, 6, 3, 16)},
    ),
    Wrong(
        "no-kv-heads",
        ValueError,
        "q has 8 heads and k has 0, expected heads_kv to divide heads",
        lambda: {"k": ones(2, 6, 0, 16), "v": ones(2, 6, 0, 16)},
    ),
    Wrong(
        "head-dim-0",
        ValueError,
        "q has shape [2, 4, 8, 0], expected a head dim >= 1",
        lambda: {"q": ones(2, 4, 8, 0), "k": ones(2, 6, 2, 0)},
    ),
    Wrong(
        "head-dim-v-0",
        ValueError,
        "v has shape [2, 6, 2, 0], expected a head dim >= 1",
        lambda: {"v": ones(2, 6, 2, 0)},
    ),
    Wrong(
        "integers",
        TypeError,
        "q has dtype torch.int64, expected float16, bfloat16, float32 or float64",
        lambda: {"q": ones(2, 4, 8, 16, dtype=torch.int64)},
    ),
    Wrong(
        "complex",
        TypeError,
        "v has dtype torch.complex64, expected float16, bfloat16, float32 or float64",
        lambda: {"v": ones(2, 6, 2, 16, dtype=torch.complex64)},
    ),
    Wrong(
        "dtypes-differ",
        TypeError,
        "k has dtype torch.float16, expected torch.float32 (the dtype of q)",
        lambda: {"k": ones(2, 6, 2, 16, dtype=half())},
    ),
    Wrong(
        "devices-differ",
        ValueError,
        "v is on meta, expected DEVICE (the device of q)",
        lambda: {"v": ones(2, 6, 2, 16, device="meta")},
    ),
    Wrong(
        "sparse",
        TypeError,
        "k has layout torch.sparse_coo, expected torch.strided "
        "(pack ragged sequences and call attention_varlen)",
        lambda: {"k": ones(2, 6, 2, 16).to_sparse()},
    ),
]

OPTIONS = [
    Wrong("causal", TypeError, "causal is a int, expected a bool", lambda: {"causal": 1}),
    Wrong(
        "return-lse", TypeError, "return_lse is None, expected a bool", lambda: {"return_lse": None}
    ),
    Wrong(
        "deterministic",
        TypeError,
        "deterministic is a str, expected a bool",
        lambda: {"deterministic": "yes"},
    ),
    Wrong(
        "window-int",
        TypeError,
        "window is a int, expected (left, right) or None",
        lambda: {"window": 128},
    ),
    Wrong(
        "window-sides",
        ValueError,
        "window has 3 sides, expected (left, right)",
        lambda: {"window": (1, 2, 3)},
    ),
    Wrong(
        "window-negative",
        ValueError,
        "window's left side is -1, expected an int >= 0 (None is unbounded)",
        lambda: {"window": (-1, 0)},
    ),
    Wrong(
        "window-float",
        TypeError,
        "window's right side is a float, expected an int or None",
        lambda: {"window": (4, 2.0)},
    ),
    Wrong(
        "scale-nan",
        ValueError,
        "scale is nan, expected a finite number",
        lambda: {"scale": float("nan")},
    ),
    Wrong(
        "scale-tensor",
        TypeError,
        "scale is a torch.Tensor, expected a float or None",
        lambda: {"scale": torch.tensor(0.5)},
    ),
    Wrong(
        "softcap-negative",
        ValueError,
        "softcap is -1.0, expected a number >= 0 (None or 0 for no cap)",
        lambda: {"softcap": -1.0},
    ),
    Wrong(
        "softcap-inf",
        ValueError,
        "softcap is inf, expected a finite number",
        lambda: {"softcap": float("inf")},
    ),
    Wrong(
        "softcap-bool",
        TypeError,
        "softcap is a bool, expected a float or None",
        lambda: {"softcap": True},
    ),
    Wrong(
        "bias-mask",
        TypeError,
        "bias has dtype torch.bool, expected torch.float32; "
        "a mask becomes a bias with torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)",
        lambda: {"bias": ones(4, 6, dtype=torch.bool)},
    ),
    Wrong(
        "bias-dtype",
        TypeError,
        "bias has dtype torch.float16, expected torch.float32",
        lambda: {"bias": ones(4, 6, dtype=half())},
    ),
    Wrong(
        "bias-shape",
        ValueError,
        "bias has shape [6, 4], expected one that broadcasts to [2, 8, 4, 6] ",
        lambda: {"bias": ones(6, 4)},
    ),
    Wrong(
        "bias-rank",
        ValueError,
        "bias has shape [1, 2, 8, 4, 6], expected one that broadcasts to [2, 8, 4, 6] ",
        lambda: {"bias": ones(1, 2, 8, 4, 6)},
    ),
    Wrong(
        "bias-device",
        ValueError,
        "bias is on meta, expected DEVICE (the device of q)",
        lambda: {"bias": ones(4, 6, device="meta")},
    ),
    Wrong(
        "bias-number", TypeError, "bias is a float, expected a torch.Tensor", lambda: {"bias": 0.5}
    ),
    Wrong(
        "alibi-list",
        TypeError,
        "alibi_slopes is a list, expected a torch.Tensor",
        lambda: {"alibi_slopes": [0.5] * 8},
    ),
    Wrong(
        "alibi-dtype",
        TypeError,
        "alibi_slopes has dtype torch.bfloat16, expected torch.float32",
        lambda: {"alibi_slopes": ones(8, dtype=torch.bfloat16)},
    ),
    Wrong(
        "alibi-heads",
        ValueError,
        "alibi_slopes has shape [2], expected [8] or [2, 8] ([heads] or [batch, heads])",
        lambda: {"alibi_slopes": ones(2)},
    ),
    Wrong(
        "alibi-batch",
        ValueError,
        "alibi_slopes has shape [3, 8], expected [8] or [2, 8] ([heads] or [batch, heads])",
        lambda: {"alibi_slopes": ones(3, 8)},
    ),
    Wrong(
        "sink-dtype",
        TypeError,
        "sink has dtype torch.float16, expected torch.float32",
        lambda: {"sink": ones(8, dtype=half())},
    ),
    Wrong(
        "sink-shape",
        ValueError,
        "sink has shape [8, 1], expected [8] ([heads])",
        lambda: {"sink": ones(8, 1)},
    ),
    Wrong(
        "sink-device",
        ValueError,
        "sink is on meta, expected DEVICE (the device of q)",
        lambda: {"sink": ones(8, device="meta")},
    ),
    Wrong(
        "dropout-above-1",
        ValueError,
        "dropout_p is 1.5, expected 0 <= dropout_p <= 1",
        lambda: {"dropout_p": 1.5},
    ),
    Wrong(
        "dropout-nan",
        ValueError,
        "dropout_p is nan, expected 0 <= dropout_p <= 1",
        lambda: {"dropout_p": float("nan")},
    ),
    Wrong(
        "dropout-none",
        TypeError,
        "dropout_p is None, expected a float",
        lambda: {"dropout_p": None},
    ),
    Wrong(
        "seed-float",
        TypeError,
        "dropout_seed is a float, expected an int, an int64 tensor of one element or None",
        lambda: {"dropout_p": 0.5, "dropout_seed": 1.0},
    ),
    Wrong(
        "seed-dtype",
        TypeError,
        "dropout_seed has dtype torch.int32, expected torch.int64",
        lambda: {"dropout_p": 0.5, "dropout_seed": offsets(1)},
    ),
    Wrong(
        "seed-shape",
        ValueError,
        "dropout_seed has shape [2], expected one element, [1] or []",
        lambda: {"dropout_p": 0.5, "dropout_seed": offsets(1, 2, dtype=torch.int64)},
    ),
    Wrong(
        "seed-device",
        ValueError,
        "dropout_seed is on meta, expected DEVICE (the device of q)",
        lambda: {"dropout_seed": ones(1, dtype=torch.int64, device="meta")},
    ),
    Wrong(
        "backend-unknown",
        ValueError,
        "backend is 'flash', expected one of ('auto', 'sm90', 'sm80', 'reference')",
        lambda: {"backend": "flash"},
    ),
    Wrong("backend-type", TypeError, "backend is None, expected a str", lambda: {"backend": None}),
]

VARLEN = [
    Wrong(
        "q-rank",
        ValueError,
        "q has shape [1, 4, 8, 16], expected 3 dimensions [total, heads, head_dim]",
        lambda: {"q": ones(1, 4, 8, 16)},
    ),
    Wrong(
        "head-dim",
        ValueError,
        "k has shape [6, 2, 24], expected [*, 2, 16] (head_dim must match q)",
        lambda: {"k": ones(6, 2, 24)},
    ),
    Wrong(
        "v-total",
        ValueError,
        "v has shape [7, 2, 16], expected [6, 2, *] (total_k and heads_kv must match k)",
        lambda: {"v": ones(7, 2, 16)},
    ),
    Wrong(
        "cu-list",
        TypeError,
        "cu_seqlens_q is a list, expected a torch.Tensor",
        lambda: {"cu_seqlens_q": [0, 3, 4]},
    ),
    Wrong(
        "cu-int64",
        TypeError,
        "cu_seqlens_k has dtype torch.int64, expected torch.int32",
        lambda: {"cu_seqlens_k": offsets(0, 2, 6, dtype=torch.int64)},
    ),
    Wrong(
        "cu-rank",
        ValueError,
        "cu_seqlens_q has shape [1, 3], expected [batch + 1]",
        lambda: {"cu_seqlens_q": offsets(0, 3, 4)[None]},
    ),
    Wrong(
        "cu-empty",
        ValueError,
        "cu_seqlens_q has shape [0], expected [batch + 1]",
        lambda: {"cu_seqlens_q": offsets()},
    ),
    Wrong(
        "cu-device",
        ValueError,
        "cu_seqlens_q is on meta, expected DEVICE (the device of q)",
        lambda: {"cu_seqlens_q": offsets(0, 3, 4).to("meta")},
    ),
    Wrong(
        "cu-batch",
        ValueError,
        "cu_seqlens_k has shape [4], expected [3] ([batch + 1], as cu_seqlens_q)",
        lambda: {"cu_seqlens_k": offsets(0, 2, 4, 6)},
    ),
    Wrong(
        "max-tensor",
        TypeError,
        "max_seqlen_q is a torch.Tensor, expected an int "
        "(call .item() on it once, outside of the model)",
        lambda: {"max_seqlen_q": torch.tensor(3)},
    ),
    Wrong(
        "max-none",
        TypeError,
        "max_seqlen_k is None, expected an int",
        lambda: {"max_seqlen_k": None},
    ),
    Wrong(
        "max-negative",
        ValueError,
        "max_seqlen_k is -1, expected an int >= 0",
        lambda: {"max_seqlen_k": -1},
    ),
    Wrong(
        "bias-shape",
        ValueError,
        "bias has shape [4, 6], expected one that broadcasts to [2, 8, 3, 4] "
        "([batch, heads, max_seqlen_q, max_seqlen_k])",
        lambda: {"bias": ones(4, 6)},
    ),
]

VARLEN_VALUES = [  # read on the CPU alone
    Wrong(
        "cu-start",
        ValueError,
        "cu_seqlens_q starts with 1, expected 0",
        lambda: {"cu_seqlens_q": offsets(1, 3, 4)},
    ),
    Wrong(
        "cu-decreases",
        ValueError,
        "cu_seqlens_k is [0, 7, 6], expected no decrease",
        lambda: {"cu_seqlens_k": offsets(0, 7, 6)},
    ),
    Wrong(
        "cu-end",
        ValueError,
        "cu_seqlens_k ends with 5, expected 6 (the rows of k)",
        lambda: {"cu_seqlens_k": offsets(0, 2, 5)},
    ),
    Wrong(
        "max-short",
        ValueError,
        "max_seqlen_q is 2, expected at least 3 (the longest sequence of cu_seqlens_q)",
        lambda: {"max_seqlen_q": 2},
    ),
]
