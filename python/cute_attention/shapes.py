"""Checks of q, k and v and of how sequences are packed: dtypes, devices and shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import on_device, size, tensors

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"


def check_kinds(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v are floating, strided, of one dtype and on one device."""
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise TypeError(
                f"{name}: {label} has layout {layout}, expected torch.strided "
                "(pack ragged sequences and call attention_varlen)"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: {label} has dtype {tensor.dtype}, expected {_DTYPE_NAMES}")
    for label, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{name}: {label} has dtype {tensor.dtype}, expected {q.dtype} (the dtype of q)"
            )
        on_device(name, label, tensor, q.device)


def check_shapes(name: str, q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """q, k and v are `[batch, seqlen, heads, head_dim]`, or `[total, heads, head_dim]`, and
    agree."""
    rank, layout = (3, "[total, heads, head_dim]") if packed else (4, _DENSE)
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            raise ValueError(
                f"{name}: {label} has shape {list(tensor.shape)}, expected {rank} dimensions "
                f"{layout}"
            )
    _check_agreement(name, q, k, v, "" if packed else _layout_hint(q, k, v))


_DENSE = "[batch, seqlen, heads, head_dim]"


def _check_agreement(name: str, q: Tensor, k: Tensor, v: Tensor, hint: str) -> None:
    (*batch, _, heads, head_dim), (*rows_kv, heads_kv, head_dim_k) = q.shape, k.shape
    same_batch = rows_kv[:-1] == batch
    if not same_batch or head_dim_k != head_dim:
        why = "head_dim" if same_batch else "batch"
        raise _shape_error(
            name, "k", k, [*batch, "*", heads_kv, head_dim], f"{why} must match q", hint
        )
    if v.shape[:-1] != k.shape[:-1]:
        why = "batch, seqlen_k and heads_kv" if batch else "total_k and heads_kv"
        raise _shape_error(name, "v", v, [*rows_kv, heads_kv, "*"], f"{why} must match k", hint)
    if heads % heads_kv != 0 if heads_kv != 0 else heads != 0:
        raise ValueError(
            f"{name}: q has {heads} heads and k has {heads_kv}, expected heads_kv to divide heads "
            f"(query head h reads kv head h // (heads // heads_kv)){hint}"
        )
    for label, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] == 0:
            raise ValueError(
                f"{name}: {label} has shape {list(tensor.shape)}, expected a head dim >= 1"
            )


def _layout_hint(q: Tensor, k: Tensor, v: Tensor) -> str:
    """What to add to an error where the shapes would be right in the layout of PyTorch's
    attention."""
    (batch, heads, _, head_dim), (batch_k, heads_kv, _, head_dim_k) = q.shape, k.shape
    if (batch, head_dim) != (batch_k, head_dim_k) or k.shape[:-1] != v.shape[:-1]:
        return ""
    if heads_kv == 0 or heads % heads_kv != 0:
        return ""
    return (
        f"; these shapes fit [batch, heads, seqlen, head_dim], expected {_DENSE}: pass "
        "q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2), and transpose the output back"
    )


def check_packing(
    q: Tensor, offsets_q: Any, offsets_k: Any, max_q: Any, max_k: Any
) -> tuple[Tensor, Tensor, int, int]:
    """int32 `[batch + 1]` on q's device, returned contiguous, and the longest sequences."""
    name = "attention_varlen"
    _check_offsets(name, "cu_seqlens_q", offsets_q, q)
    _check_offsets(name, "cu_seqlens_k", offsets_k, q)
    max_q, max_k = size(name, "max_seqlen_q", max_q), size(name, "max_seqlen_k", max_k)
    if offsets_q.shape != offsets_k.shape:
        raise ValueError(
            f"{name}: cu_seqlens_k has shape {list(offsets_k.shape)}, expected "
            f"{list(offsets_q.shape)} ([batch + 1], as cu_seqlens_q)"
        )
    return offsets_q.contiguous(), offsets_k.contiguous(), max_q, max_k


def _check_offsets(name: str, label: str, value: Any, q: Tensor) -> None:
    tensors(name, **{label: value})
    if value.dtype != torch.int32:
        integers = not (value.is_floating_point() or value.is_complex())
        cast = f" (pass {label}.int())" if integers else ""
        raise TypeError(f"{name}: {label} has dtype {value.dtype}, expected torch.int32{cast}")
    if value.dim() != 1 or value.shape[0] == 0:
        raise ValueError(f"{name}: {label} has shape {list(value.shape)}, expected [batch + 1]")
    on_device(name, label, value, q.device)


def check_lengths(side: str, offsets: Tensor, rows: Tensor, longest: int) -> None:
    """The values of cu_seqlens, where they can be read; reading those on a GPU waits for it."""
    name, total = "attention_varlen", rows.shape[0]
    values = offsets.tolist()
    lengths = [end - start for start, end in pairwise(values)]
    if values[0] != 0:
        raise ValueError(f"{name}: cu_seqlens_{side} starts with {values[0]}, expected 0")
    if min(lengths, default=0) < 0:
        raise ValueError(f"{name}: cu_seqlens_{side} is {values}, expected no decrease")
    if values[-1] > total:
        raise ValueError(
            f"{name}: cu_seqlens_{side} ends with {values[-1]}, expected at most {total} "
            f"(the rows of {side})"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"{name}: max_seqlen_{side} is {longest}, expected at least {max(lengths)} "
            f"(the longest sequence of cu_seqlens_{side})"
        )


def _shape_error(
    name: str, label: str, tensor: Tensor, expected: list[Any], why: str, hint: str
) -> ValueError:
    wanted = ", ".join(str(item) for item in expected)
    return ValueError(
        f"{name}: {label} has shape {list(tensor.shape)}, expected [{wanted}] ({why}){hint}"
    )
