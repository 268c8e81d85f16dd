"""Whether a kernel computes attention: it is tried beside one that does, before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..arguments import DTYPE_NAMES, FEATURES
from ..native.core import Kernel
from ..problem import Problem

# What the errors of a kernel may be over those of the one that is trusted. Another tile sums in
# another order, which changes the root mean square little and the largest of many errors more; a
# wrong mask, or a tile that is read before it is there, changes both by orders of magnitude.
_RMS = 1.5
_LARGEST = 3.0
_FLOOR = 1e-5  # of the values' root mean square: two kernels may both be nearly exact

# Queries and keys: no whole tiles, fewer queries than keys, one query, fewer keys than a tile.
LENGTHS = ((257, 257), (130, 517), (1, 300), (333, 61))
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (70, 20)})
_BATCH = 2
_HEADS_KV = 2
_MOST_GROUPED = 4  # query heads of a KV head
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_BITS = {word: bit for bit, word in FEATURES.items()}


def fault_of(kernel: Kernel, trusted: Kernel, problem: Problem) -> str:
    """What is wrong with the results of a kernel at small shapes, against attention in float64 and
    beside a kernel that is trusted; "" for nothing.

    Args:
        kernel: one that computes the same as `trusted`.
        trusted: one of the tables.
        problem: of the calls for which the kernel is meant, on a GPU: dtype, head dims, GQA and
            features are those of the trial.
    """
    direction = kernel.direction
    for lengths in LENGTHS:
        tensors, features = _inputs(problem, *lengths)
        exact_tensors = [tensor.double() for tensor in tensors]
        exact_features = dict(features)
        if "bias" in features:
            exact_features["bias"] = features["bias"].double()
        for mask in MASKS:
            exact = _results(
                direction, exact_tensors, backend="reference", **exact_features, **mask
            )
            found = _results(direction, tensors, kernel=kernel, **features, **mask)
            usual = _results(direction, tensors, kernel=trusted, **features, **mask)
            for name in exact:
                mine = _errors(found[name], exact[name])
                theirs = _errors(usual[name], exact[name])
                if not _is_as_accurate(mine, theirs):
                    return (
                        f"{name} is wrong for {lengths[0]} queries, {lengths[1]} keys, {mask}: its "
                        f"error is {mine[0]:.2g} (rms) and {mine[1]:.2g} (at most), that of "
                        f"{trusted.name} {theirs[0]:.2g} and {theirs[1]:.2g}"
                    )
    return ""


def _inputs(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the gradient of the output; and the options that are the problem's features."""
    device, dtype = problem.device, _DTYPES[problem.dtype]
    generator = torch.Generator(device or "cpu").manual_seed(0)
    group = max(1, min(_MOST_GROUPED, problem.heads // max(problem.heads_kv, 1)))
    heads = group * _HEADS_KV

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tensors = [
        draw(_BATCH, seqlen_q, heads, problem.head_dim),
        draw(_BATCH, seqlen_k, _HEADS_KV, problem.head_dim),
        draw(_BATCH, seqlen_k, _HEADS_KV, problem.head_dim_v),
        draw(_BATCH, seqlen_q, heads, problem.head_dim_v),
    ]
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "bias": lambda: {"bias": draw(1, heads, seqlen_q, seqlen_k)},
        "alibi": lambda: {"alibi_slopes": draw(heads, dtype=torch.float32).abs()},
        "sink": lambda: {"sink": draw(heads, dtype=torch.float32)},
        "dropout": lambda: {"dropout_p": 0.25, "dropout_seed": 7},
    }
    features: dict[str, Any] = {"softcap": problem.softcap or None}
    for word, make in made.items():
        if problem.features & _BITS[word]:
            features |= make()
    return tensors, features


def _results(direction: str, tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """The output of a call and, where the kernel is a backward one, the gradients."""
    *inputs, grad = tensors
    if direction == "forward":
        with torch.no_grad():
            return {"out": attention(*inputs, **options)}
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad(attention(*leaves, **options), leaves, grad)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def _errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The root mean square of the errors and the largest, over the values' root mean square."""
    scale = float(exact.square().mean().sqrt()) or 1.0
    difference = found.double() - exact
    return float(difference.square().mean().sqrt()) / scale, float(difference.abs().max()) / scale


def _is_as_accurate(mine: tuple[float, float], theirs: tuple[float, float]) -> bool:
    """False where an error is NaN, with which every comparison is."""
    return mine[0] <= _RMS * theirs[0] + _FLOOR and mine[1] <= _LARGEST * theirs[1] + _FLOOR
