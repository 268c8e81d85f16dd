"""The table of wrong calls. Each has what is wrong, and the type and the message of the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def dense(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """The arguments of a call in which only `changes` are wrong. It has batch 2, 4 queries, 6 keys,
    8 heads, 2 KV heads and head dim 16."""
    shapes = {"q": (2, 4, 8, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16)}
    tensors: dict[str, Any] = {name: torch.ones(shape) for name, shape in shapes.items()}
    return {name: move(value, device) for name, value in (tensors | changes).items()}


def packed(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """The same for two packed sequences, with 3 and 1 queries and 2 and 4 keys."""
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


def parameter(*values: int) -> Tensor:
    return torch.nn.Parameter(offsets(*values), requires_grad=False)


class Subclass(Tensor):
    """A subclass of Tensor, as some libraries have one."""


def ones(*shape: int, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Wrong:
    """A wrong call. `changes` is a function, so that its tensors are made when the test runs."""

    id: str
    error: type[Exception]
    changes: Callable[[], dict[str, Any]]
    message: str  # how the message starts; DEVICE stands for the device of q


DENSE = [
    Wrong("q-none", TypeError, lambda: {"q": None},
          "q is None, expected a torch.Tensor"),
    Wrong("k-list", TypeError, lambda: {"k": [1.0]},
          "k is a list, expected a torch.Tensor"),
    Wrong("v-numpy", TypeError, lambda: {"v": ones(2, 6, 2, 16).numpy()},
          "v is a numpy.ndarray, expected a torch.Tensor"),
    Wrong("q-rank", ValueError, lambda: {"q": ones(4, 8, 16)},
          "q has shape [4, 8, 16], expected 4 dimensions [batch, seqlen, heads, head_dim]"),
    Wrong("v-rank", ValueError, lambda: {"v": ones(2, 6, 2, 16, 1)},
          "v has shape [2, 6, 2, 16, 1], expected 4 dimensions [batch, seqlen, heads, head_dim]"),
    Wrong("head-dim", ValueError, lambda: {"k": ones(2, 6, 2, 24)},
          "k has shape [2, 6, 2, 24], expected [2, *, 2, 16] (head_dim must match q)"),
    Wrong("batch", ValueError, lambda: {"k": ones(3, 6, 2, 16), "v": ones(3, 6, 2, 16)},
          "k has shape [3, 6, 2, 16], expected [2, *, 2, 16] (batch must match q)"),
    Wrong("v-seqlen", ValueError, lambda: {"v": ones(2, 7, 2, 16)},
          "v has shape [2, 7, 2, 16], expected [2, 6, 2, *] (batch, seqlen_k and heads_kv must "
          "match k)"),
    Wrong("v-heads", ValueError, lambda: {"v": ones(2, 6, 4, 16)},
          "v has shape [2, 6, 4, 16], expected [2, 6, 2, *] (batch, seqlen_k and heads_kv must "
          "match k)"),
    Wrong("heads-divide", ValueError, lambda: {"k": ones(2, 6, 3, 16), "v": ones(2, 6, 3, 16)},
          "q has 8 heads and k has 3, expected heads_kv to divide heads (query head h reads kv "
          "head h // (heads // heads_kv))"),
    Wrong("no-kv-heads", ValueError, lambda: {"k": ones(2, 6, 0, 16), "v": ones(2, 6, 0, 16)},
          "q has 8 heads and k has 0, expected heads_kv to divide heads"),
    Wrong("head-dim-0", ValueError, lambda: {"q": ones(2, 4, 8, 0), "k": ones(2, 6, 2, 0)},
          "q has shape [2, 4, 8, 0], expected a head dim >= 1"),
    Wrong("head-dim-v-0", ValueError, lambda: {"v": ones(2, 6, 2, 0)},
          "v has shape [2, 6, 2, 0], expected a head dim >= 1"),
    Wrong("integers", TypeError, lambda: {"q": ones(2, 4, 8, 16, dtype=torch.int64)},
          "q has dtype torch.int64, expected float16, bfloat16, float32 or float64"),
    Wrong("complex", TypeError, lambda: {"v": ones(2, 6, 2, 16, dtype=torch.complex64)},
          "v has dtype torch.complex64, expected float16, bfloat16, float32 or float64"),
    Wrong("dtypes-differ", TypeError, lambda: {"k": ones(2, 6, 2, 16, dtype=torch.float16)},
          "k has dtype torch.float16, expected torch.float32 (the dtype of q)"),
    Wrong("devices-differ", ValueError, lambda: {"v": ones(2, 6, 2, 16, device="meta")},
          "v is on meta, expected DEVICE (the device of q)"),
    Wrong("pytorch-layout", ValueError,
          lambda: {"q": ones(2, 8, 1, 16), "k": ones(2, 2, 6, 16), "v": ones(2, 2, 6, 16)},
          "q has 1 heads and k has 6, expected heads_kv to divide heads (query head h reads kv "
          "head h // (heads // heads_kv)); these shapes fit [batch, heads, seqlen, head_dim], "
          "expected [batch, seqlen, heads, head_dim]: pass q.transpose(1, 2), k.transpose(1, 2)"),
    Wrong("nested", TypeError, lambda: {"q": torch.nested.nested_tensor([ones(4, 8, 16)] * 2)},
          "q has layout nested, expected torch.strided (pack ragged sequences and call "
          "attention_varlen)"),
    Wrong("sparse", TypeError, lambda: {"k": ones(2, 6, 2, 16).to_sparse()},
          "k has layout torch.sparse_coo, expected torch.strided (pack ragged sequences and "
          "call attention_varlen)"),
]  # fmt: skip

OPTIONS = [
    Wrong("unknown", TypeError, lambda: {"mystery": 1},
          "there is no option mystery, see help(cute_attention."),
    Wrong("is-causal", TypeError, lambda: {"is_causal": True},
          "there is no option is_causal, pass causal (its mask is aligned to the bottom right"),
    Wrong("attn-mask", TypeError, lambda: {"attn_mask": None},
          "there is no option attn_mask, pass bias, which is added to the scores; of a mask"),
    Wrong("softmax-scale", TypeError, lambda: {"softmax_scale": 0.5},
          "there is no option softmax_scale, pass scale"),
    Wrong("window-size", TypeError, lambda: {"window_size": (-1, 0)},
          "there is no option window_size, pass window, where None and not -1 is unbounded"),
    Wrong("causal", TypeError, lambda: {"causal": 1},
          "causal is an int, expected a bool"),
    Wrong("return-lse", TypeError, lambda: {"return_lse": None},
          "return_lse is None, expected a bool"),
    Wrong("deterministic", TypeError, lambda: {"deterministic": "yes"},
          "deterministic is a str, expected a bool"),
    Wrong("window-int", TypeError, lambda: {"window": 128},
          "window is an int, expected (left, right) or None"),
    Wrong("window-sides", ValueError, lambda: {"window": (1, 2, 3)},
          "window has 3 sides, expected (left, right)"),
    Wrong("window-negative", ValueError, lambda: {"window": (-1, 0)},
          "window's left side is -1, expected an int >= 0 (None is unbounded)"),
    Wrong("window-float", TypeError, lambda: {"window": (4, 2.0)},
          "window's right side is a float, expected an int or None"),
    Wrong("window-huge", ValueError, lambda: {"window": (0, 2**63)},
          "window's right side is 9223372036854775808, expected an int from 0 to "
          "9223372036854775807 (None is unbounded)"),
    Wrong("window-numpy-float", TypeError, lambda: {"window": (np.float32(4), 2)},
          "window's left side is a float, expected an int or None"),
    Wrong("causal-numpy-int", TypeError, lambda: {"causal": np.int64(1)},
          "causal is an int, expected a bool"),
    Wrong("window-tensor", TypeError, lambda: {"window": torch.tensor([4, 2])},
          "window is a torch.Tensor, expected (left, right) or None"),
    Wrong("window-array", TypeError, lambda: {"window": np.array([4, 2])},
          "window is a numpy.ndarray, expected (left, right) or None"),
    Wrong("scale-too-large", ValueError, lambda: {"scale": 1e300},
          "scale is too large, expected a number of at most 2^127"),
    Wrong("scale-too-large-int", ValueError, lambda: {"scale": 10**400},
          "scale is too large, expected a number of at most 2^127"),
    Wrong("softcap-too-large", ValueError, lambda: {"softcap": 1e300},
          "softcap is too large, expected a number of at most 2^127"),
    Wrong("softcap-too-small", ValueError, lambda: {"softcap": 1e-40},
          "softcap is 1e-40, expected a larger one for scale 0.25: their quotient overflows"),
    Wrong("softcap-too-large-for-scale", ValueError, lambda: {"softcap": 1e31},
          "softcap is 1e+31, expected a smaller one for scale 0.25, or None for no cap: their "
          "quotient is below 2^-100"),
    Wrong("scale-nan", ValueError, lambda: {"scale": float("nan")},
          "scale is nan, expected a finite number"),
    Wrong("scale-tensor", TypeError, lambda: {"scale": torch.tensor(0.5)},
          "scale is a torch.Tensor, expected a float or None"),
    Wrong("softcap-negative", ValueError, lambda: {"softcap": -1.0},
          "softcap is -1.0, expected a number >= 0 (None or 0 for no cap)"),
    Wrong("softcap-inf", ValueError, lambda: {"softcap": float("inf")},
          "softcap is inf, expected a finite number"),
    Wrong("softcap-bool", TypeError, lambda: {"softcap": True},
          "softcap is a bool, expected a float or None"),
    Wrong("bias-mask", TypeError, lambda: {"bias": ones(4, 6, dtype=torch.bool)},
          "bias has dtype torch.bool, expected torch.float32; a mask becomes a bias with "
          "torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)"),
    Wrong("bias-dtype", TypeError, lambda: {"bias": ones(4, 6, dtype=torch.float16)},
          "bias has dtype torch.float16, expected torch.float32"),
    Wrong("bias-shape", ValueError, lambda: {"bias": ones(6, 4)},
          "bias has shape [6, 4], expected one that broadcasts to [2, 8, 4, 6] "),
    Wrong("bias-rank", ValueError, lambda: {"bias": ones(1, 2, 8, 4, 6)},
          "bias has shape [1, 2, 8, 4, 6], expected one that broadcasts to [2, 8, 4, 6] "),
    Wrong("bias-device", ValueError, lambda: {"bias": ones(4, 6, device="meta")},
          "bias is on meta, expected DEVICE (the device of q)"),
    Wrong("bias-number", TypeError, lambda: {"bias": 0.5},
          "bias is a float, expected a torch.Tensor"),
    Wrong("alibi-list", TypeError, lambda: {"alibi_slopes": [0.5] * 8},
          "alibi_slopes is a list, expected a torch.Tensor"),
    Wrong("alibi-dtype", TypeError, lambda: {"alibi_slopes": ones(8, dtype=torch.bfloat16)},
          "alibi_slopes has dtype torch.bfloat16, expected torch.float32"),
    Wrong("alibi-heads", ValueError, lambda: {"alibi_slopes": ones(2)},
          "alibi_slopes has shape [2], expected [8] or [2, 8] ([heads] or [batch, heads])"),
    Wrong("alibi-batch", ValueError, lambda: {"alibi_slopes": ones(3, 8)},
          "alibi_slopes has shape [3, 8], expected [8] or [2, 8] ([heads] or [batch, heads])"),
    Wrong("alibi-gradient", ValueError,
          lambda: {"alibi_slopes": ones(8).requires_grad_()},
          "alibi_slopes requires a gradient, expected a tensor that does not, since the slopes "
          "have none (pass alibi_slopes.detach())"),
    Wrong("sink-dtype", TypeError, lambda: {"sink": ones(8, dtype=torch.float16)},
          "sink has dtype torch.float16, expected torch.float32 (pass sink.float())"),
    Wrong("sink-bf16", TypeError, lambda: {"sink": ones(8, dtype=torch.bfloat16)},
          "sink has dtype torch.bfloat16, expected torch.float32 (pass sink.float())"),
    Wrong("sink-shape", ValueError, lambda: {"sink": ones(8, 1)},
          "sink has shape [8, 1], expected [8] ([heads])"),
    Wrong("sink-device", ValueError, lambda: {"sink": ones(8, device="meta")},
          "sink is on meta, expected DEVICE (the device of q)"),
    Wrong("dropout-above-1", ValueError, lambda: {"dropout_p": 1.5},
          "dropout_p is 1.5, expected 0 <= dropout_p <= 1"),
    Wrong("dropout-nan", ValueError, lambda: {"dropout_p": float("nan")},
          "dropout_p is nan, expected 0 <= dropout_p <= 1"),
    Wrong("dropout-none", TypeError, lambda: {"dropout_p": None},
          "dropout_p is None, expected a float"),
    Wrong("seed-float", TypeError, lambda: {"dropout_p": 0.5, "dropout_seed": 1.0},
          "dropout_seed is a float, expected an int, an int64 tensor of one element or None"),
    Wrong("seed-dtype", TypeError, lambda: {"dropout_p": 0.5, "dropout_seed": offsets(1)},
          "dropout_seed has dtype torch.int32, expected torch.int64"),
    Wrong("seed-shape", ValueError, lambda: {"dropout_seed": offsets(1, 2).long()},
          "dropout_seed has shape [2], expected one element, [1] or []"),
    Wrong("seed-device", ValueError, lambda: {"dropout_seed": offsets(1).long().to("meta")},
          "dropout_seed is on meta, expected DEVICE (the device of q)"),
    Wrong("backend-unknown", ValueError, lambda: {"backend": "flash"},
          "backend is 'flash', expected one of ('auto', 'sm90', 'sm80', 'reference')"),
    Wrong("backend-type", TypeError, lambda: {"backend": None},
          "backend is None, expected a str"),
    Wrong("kernel-type", TypeError, lambda: {"kernel": "sm80_fwd_bf16_d64"},
          "kernel is a str, expected one that rows.Row(...).build() or kernels() returns"),
    Wrong("kernel-in-a-tuple", TypeError, lambda: {"kernel": (None,)},
          "kernel is None, expected one that rows.Row(...).build() or kernels() returns"),
]  # fmt: skip

VARLEN = [
    Wrong("q-rank", ValueError, lambda: {"q": ones(1, 4, 8, 16)},
          "q has shape [1, 4, 8, 16], expected 3 dimensions [total, heads, head_dim]"),
    Wrong("head-dim", ValueError, lambda: {"k": ones(6, 2, 24)},
          "k has shape [6, 2, 24], expected [*, 2, 16] (head_dim must match q)"),
    Wrong("v-total", ValueError, lambda: {"v": ones(7, 2, 16)},
          "v has shape [7, 2, 16], expected [6, 2, *] (total_k and heads_kv must match k)"),
    Wrong("cu-list", TypeError, lambda: {"cu_seqlens_q": [0, 3, 4]},
          "cu_seqlens_q is a list, expected a torch.Tensor"),
    Wrong("cu-int64", TypeError, lambda: {"cu_seqlens_k": offsets(0, 2, 6, dtype=torch.int64)},
          "cu_seqlens_k has dtype torch.int64, expected torch.int32 (pass cu_seqlens_k.int())"),
    Wrong("cu-rank", ValueError, lambda: {"cu_seqlens_q": offsets(0, 3, 4)[None]},
          "cu_seqlens_q has shape [1, 3], expected [batch + 1]"),
    Wrong("cu-empty", ValueError, lambda: {"cu_seqlens_q": offsets()},
          "cu_seqlens_q has shape [0], expected [batch + 1]"),
    Wrong("cu-device", ValueError, lambda: {"cu_seqlens_q": offsets(0, 3, 4).to("meta")},
          "cu_seqlens_q is on meta, expected DEVICE (the device of q)"),
    Wrong("cu-batch", ValueError, lambda: {"cu_seqlens_k": offsets(0, 2, 4, 6)},
          "cu_seqlens_k has shape [4], expected [3] ([batch + 1], as cu_seqlens_q)"),
    Wrong("max-tensor", TypeError, lambda: {"max_seqlen_q": torch.tensor(3)},
          "max_seqlen_q is a torch.Tensor, expected an int (call .item() on it once, outside "
          "of the model)"),
    Wrong("max-none", TypeError, lambda: {"max_seqlen_k": None},
          "max_seqlen_k is None, expected an int"),
    Wrong("max-no-int32", ValueError, lambda: {"max_seqlen_q": 2**31},
          "max_seqlen_q is 2147483648, expected an int from 0 to 2147483647"),
    Wrong("max-numpy-float", TypeError, lambda: {"max_seqlen_q": np.float32(3)},
          "max_seqlen_q is a float, expected an int"),
    Wrong("max-negative", ValueError, lambda: {"max_seqlen_k": -1},
          "max_seqlen_k is -1, expected an int >= 0"),
    Wrong("bias-shape", ValueError, lambda: {"bias": ones(4, 6)},
          "bias has shape [4, 6], expected one that broadcasts to [2, 8, 3, 4] ([batch, heads, "
          "max_seqlen_q, max_seqlen_k])"),
]  # fmt: skip

VARLEN_VALUES = [  # wrong values of tensors, which are only checked on the CPU
    Wrong("cu-start", ValueError, lambda: {"cu_seqlens_q": offsets(1, 3, 4)},
          "cu_seqlens_q starts with 1, expected 0"),
    Wrong("cu-decreases", ValueError, lambda: {"cu_seqlens_k": offsets(0, 7, 6)},
          "cu_seqlens_k is [0, 7, 6], expected no decrease"),
    Wrong("cu-end", ValueError, lambda: {"cu_seqlens_k": offsets(0, 2, 7)},
          "cu_seqlens_k ends with 7, expected at most 6 (the rows of k)"),
    Wrong("cu-parameter", ValueError, lambda: {"cu_seqlens_q": parameter(0, 3, 5)},
          "cu_seqlens_q ends with 5, expected at most 4 (the rows of q)"),
    Wrong("cu-subclass", ValueError,
          lambda: {"cu_seqlens_k": offsets(0, 7, 6).as_subclass(Subclass)},
          "cu_seqlens_k is [0, 7, 6], expected no decrease"),
    Wrong("max-short", ValueError, lambda: {"max_seqlen_q": 2},
          "max_seqlen_q is 2, expected at least 3 (the longest sequence of cu_seqlens_q)"),
    Wrong("max-short-parameter", ValueError,
          lambda: {"cu_seqlens_k": parameter(0, 2, 6), "max_seqlen_k": 3},
          "max_seqlen_k is 3, expected at least 4 (the longest sequence of cu_seqlens_k)"),
]  # fmt: skip
