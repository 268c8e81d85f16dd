"""Checks of the arguments, once, at the edge.

Each check is one cheap expression that a correct call passes; only when it fails is the message
worked out. A message names the argument, what was expected and what came. Wrong types raise
TypeError, wrong values ValueError.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"
_INTEGERS = (int, torch.SymInt)  # the second while torch.export or make_fx traces
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
LARGEST_SIZE = 2**31 - 1  # of the sizes that cu_seqlens and the kernels can tell
_LARGEST_WINDOW = 2**63 - 1  # of what an op takes

Sides = tuple[int, int]  # of a window; -1 is unbounded


class Shape(NamedTuple):
    """The sizes of a call; of packed sequences the longest ones."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int


def tensors(name: str, **arguments: object) -> None:
    """Raise TypeError for the first argument that is no tensor."""
    for label, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected a torch.Tensor")


def same_kind(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v are floating, strided, of one dtype and on one device."""
    dtype, device = q.dtype, q.device
    if (
        dtype in DTYPES
        and k.dtype == dtype
        and v.dtype == dtype
        and k.device == device
        and v.device == device
        and q.layout == k.layout == v.layout == torch.strided
    ):
        return
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: {label} has layout {tensor.layout}, expected torch.strided "
                "(pack ragged sequences and call attention_varlen)"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: {label} has dtype {tensor.dtype}, expected {_DTYPE_NAMES}")
    for label, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: {label} has dtype {tensor.dtype}, expected {dtype} (the dtype of q)"
            )
        on_device(name, label, tensor, device)


def dense_shapes(name: str, q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """q, k and v are `[batch, seqlen, heads, head_dim]` and agree."""
    qs, ks, vs = q.shape, k.shape, v.shape
    if len(qs) == 4 and len(ks) == 4 and len(vs) == 4:
        batch, seqlen_q, heads, head_dim = qs
        batch_k, seqlen_k, heads_kv, head_dim_k = ks
        batch_v, seqlen_v, heads_v, head_dim_v = vs
        if (
            batch == batch_k
            and batch == batch_v
            and seqlen_k == seqlen_v
            and heads_kv == heads_v
            and head_dim == head_dim_k
            and (heads % heads_kv == 0 if heads_kv != 0 else heads == 0)
            and head_dim != 0
            and head_dim_v != 0
        ):
            return Shape(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v)
    raise _shapes_error(name, q, k, v, "[batch, seqlen, heads, head_dim]", 4)


def packed_shapes(name: str, q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """q, k and v are `[total, heads, head_dim]` and agree; totals stand for the lengths."""
    qs, ks, vs = q.shape, k.shape, v.shape
    if len(qs) == 3 and len(ks) == 3 and len(vs) == 3:
        total_q, heads, head_dim = qs
        total_k, heads_kv, head_dim_k = ks
        total_v, heads_v, head_dim_v = vs
        if (
            total_k == total_v
            and heads_kv == heads_v
            and head_dim == head_dim_k
            and (heads % heads_kv == 0 if heads_kv != 0 else heads == 0)
            and head_dim != 0
            and head_dim_v != 0
        ):
            return Shape(1, total_q, total_k, heads, heads_kv, head_dim, head_dim_v)
    raise _shapes_error(name, q, k, v, "[total, heads, head_dim]", 3)


def _shapes_error(name: str, q: Tensor, k: Tensor, v: Tensor, layout: str, rank: int) -> ValueError:
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            return ValueError(
                f"{name}: {label} has shape {_shape(tensor)}, expected {rank} dimensions {layout}"
            )
    (*batch, _, heads, head_dim), (*rows_kv, heads_kv, head_dim_k) = q.shape, k.shape
    if rows_kv[:-1] != batch or head_dim_k != head_dim:
        why = "head_dim" if rows_kv[:-1] == batch else "batch"
        return _shape_error(name, "k", k, [*batch, "*", heads_kv, head_dim], f"{why} must match q")
    if v.shape[:-1] != k.shape[:-1]:
        why = "batch, seqlen_k and heads_kv" if rank == 4 else "total_k and heads_kv"
        return _shape_error(name, "v", v, [*rows_kv, heads_kv, "*"], f"{why} must match k")
    if heads % heads_kv != 0 if heads_kv else heads != 0:
        return ValueError(
            f"{name}: q has {heads} heads and k has {heads_kv}, expected heads_kv to divide heads "
            "(query head h reads kv head h // (heads // heads_kv))"
        )
    label, tensor = ("q", q) if head_dim == 0 else ("v", v)
    return ValueError(f"{name}: {label} has shape {_shape(tensor)}, expected a head dim >= 1")


def cu_seqlens(
    q: Tensor, offsets_q: Any, offsets_k: Any, max_q: Any, max_k: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """int32 `[batch + 1]` on q's device, returned contiguous, and the longest sequences."""
    name = "attention_varlen"
    _offsets(name, "cu_seqlens_q", offsets_q, q)
    _offsets(name, "cu_seqlens_k", offsets_k, q)
    longest = size(name, "max_seqlen_q", max_q), size(name, "max_seqlen_k", max_k)
    if offsets_q.shape != offsets_k.shape:
        raise ValueError(
            f"{name}: cu_seqlens_k has shape {_shape(offsets_k)}, expected {_shape(offsets_q)} "
            "([batch + 1], as cu_seqlens_q)"
        )
    return (offsets_q.contiguous(), offsets_k.contiguous()), longest


def _offsets(name: str, label: str, value: Any, q: Tensor) -> None:
    tensors(name, **{label: value})
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: {label} has dtype {value.dtype}, expected torch.int32")
    if value.dim() != 1 or value.shape[0] == 0:
        raise ValueError(f"{name}: {label} has shape {_shape(value)}, expected [batch + 1]")
    on_device(name, label, value, q.device)


def packed_lengths(side: str, offsets: Tensor, rows: Tensor, longest: int) -> None:
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


def size(name: str, label: str, value: Any) -> int:
    """An int from 0 to LARGEST_SIZE; the int of a NumPy scalar."""
    if type(value) is not int:
        value = plain(value)
        if not isinstance(value, _INTEGERS) or isinstance(value, bool):
            tensor = isinstance(value, Tensor)
            hint = " (call .item() on it once, outside of the model)" if tensor else ""
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected an int{hint}")
    return _bounded(name, label, value, LARGEST_SIZE)


def _bounded(name: str, label: str, value: Any, largest: int, hint: str = "") -> int:
    """`value`, from 0 to `largest`. In a traced graph, which may know the value only when it runs,
    no branch may depend on it: the graph checks then that it is not negative."""
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        torch._check(value >= 0)  # without a message: torch.export(strict=True) takes no function
    elif value < 0:
        raise ValueError(f"{name}: {label} is {value}, expected an int >= 0{hint}")
    elif value > largest:
        raise ValueError(f"{name}: {label} is {value}, expected an int from 0 to {largest}{hint}")
    return value


def plain(value: Any) -> Any:
    """The Python number that a NumPy scalar stands for; everything else as it is."""
    numpy = sys.modules.get("numpy")  # without it there is no such scalar
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def flags(name: str, **arguments: object) -> None:
    for label, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected a bool")


def number(name: str, label: str, value: object) -> None:
    """A finite number."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name}: {label} is {type_name(value)}, expected a float or None")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: {label} is {value}, expected a finite number")


def softcap(name: str, value: object) -> None:
    number(name, "softcap", value)
    assert isinstance(value, _NUMBERS)
    if value < 0:
        raise ValueError(
            f"{name}: softcap is {value}, expected a number >= 0 (None or 0 for no cap)"
        )


def window_sides(name: str, causal: bool, window: object) -> Sides:
    """(left, right) with -1 for unbounded; causal bounds the right side at 0."""
    if window is None:
        return (-1, 0) if causal else (-1, -1)
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{name}: window is {type_name(window)}, expected (left, right) or None")
    if len(window) != 2:
        raise ValueError(f"{name}: window has {len(window)} sides, expected (left, right)")
    left, right = window
    for label, value in (("window's left side", left), ("window's right side", right)):
        if value is None:
            continue
        if type(value) is not int and (not isinstance(value, _INTEGERS) or isinstance(value, bool)):
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected an int or None")
        _bounded(name, label, value, _LARGEST_WINDOW, " (None is unbounded)")
    return (-1 if left is None else left), (0 if causal else -1 if right is None else right)


def bias(name: str, value: object, q: Tensor, shape: tuple[int, ...]) -> None:
    """Floating, on q's device, broadcastable to `shape`, [batch, heads, seqlen_q, seqlen_k]."""
    tensors(name, bias=value)
    assert isinstance(value, Tensor)
    if value.dtype not in (q.dtype, torch.float32):
        expected = " or ".join(dict.fromkeys((str(q.dtype), "torch.float32")))
        mask = "; a mask becomes a bias with torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)"
        raise TypeError(
            f"{name}: bias has dtype {value.dtype}, expected {expected}"
            f"{mask if value.dtype == torch.bool else ''}"
        )
    on_device(name, "bias", value, q.device)
    if not _broadcasts(value.shape, shape):
        names = (
            "[batch, heads, seqlen_q, seqlen_k]"
            if q.dim() == 4
            else "[batch, heads, max_seqlen_q, max_seqlen_k]"
        )
        raise ValueError(
            f"{name}: bias has shape {_shape(value)}, expected one that broadcasts to "
            f"{list(shape)} ({names})"
        )


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` broadcasts to `target`, each of whose lengths a traced graph may
    know only when it runs: that graph then checks it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    if torch.compiler.is_compiling():
        for have, want in pairs:
            if have != 1:
                torch._check(have == want)
        return len(shape) <= len(target)
    return len(shape) <= len(target) and all(have == 1 or have == want for have, want in pairs)


def alibi_slopes(name: str, value: object, q: Tensor, batch: int) -> None:
    """`[heads]` or `[batch, heads]`, without a gradient."""
    heads = q.shape[-2]
    _vector(name, "alibi_slopes", value, q)
    assert isinstance(value, Tensor)
    without_gradient(name, value)
    shape = value.shape
    if len(shape) == 1 and shape[0] == heads:
        return
    if len(shape) == 2 and shape[0] == batch and shape[1] == heads:
        return
    raise ValueError(
        f"{name}: alibi_slopes has shape {_shape(value)}, expected [{heads}] or [{batch}, {heads}] "
        "([heads] or [batch, heads])"
    )


def without_gradient(name: str, slopes: Tensor) -> None:
    """Raise for ALiBi slopes that would wait for a gradient in vain."""
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: alibi_slopes requires a gradient, expected a tensor that does not, since the "
            "slopes have none (pass alibi_slopes.detach())"
        )


def sink(name: str, value: object, q: Tensor) -> None:
    """`[heads]`."""
    _vector(name, "sink", value, q)
    assert isinstance(value, Tensor)
    if value.dim() != 1 or value.shape[0] != q.shape[-2]:
        raise ValueError(
            f"{name}: sink has shape {_shape(value)}, expected [{q.shape[-2]}] ([heads])"
        )


def dropout(name: str, dropout_p: object, seed: object, q: Tensor) -> None:
    if not isinstance(dropout_p, _NUMBERS) or isinstance(dropout_p, bool):
        raise TypeError(f"{name}: dropout_p is {type_name(dropout_p)}, expected a float")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{name}: dropout_p is {dropout_p}, expected 0 <= dropout_p <= 1")
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool)):
        return
    if not isinstance(seed, Tensor):
        raise TypeError(
            f"{name}: dropout_seed is {type_name(seed)}, expected an int, an int64 tensor of one "
            "element or None"
        )
    if seed.dtype != torch.int64:
        raise TypeError(f"{name}: dropout_seed has dtype {seed.dtype}, expected torch.int64")
    if seed.numel() != 1:
        raise ValueError(
            f"{name}: dropout_seed has shape {_shape(seed)}, expected one element, [1] or []"
        )
    on_device(name, "dropout_seed", seed, q.device)


def on_device(name: str, label: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name}: {label} is on {tensor.device}, expected {device} (the device of q)"
        )


def _vector(name: str, label: str, value: object, q: Tensor) -> None:
    """float32 on q's device; float64 too where q is, so that gradcheck can check gradients."""
    tensors(name, **{label: value})
    assert isinstance(value, Tensor)
    if value.dtype != torch.float32 and not value.dtype == q.dtype == torch.float64:
        raise TypeError(f"{name}: {label} has dtype {value.dtype}, expected torch.float32")
    on_device(name, label, value, q.device)


def _shape_error(
    name: str, label: str, tensor: Tensor, expected: list[Any], why: str
) -> ValueError:
    wanted = ", ".join(str(item) for item in expected)
    return ValueError(f"{name}: {label} has shape {_shape(tensor)}, expected [{wanted}] ({why})")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def type_name(value: object) -> str:
    """The type of an argument, for a message: "a list", "None"."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
