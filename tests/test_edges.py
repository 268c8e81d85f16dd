"""Calls at the edge of what is legal: NumPy scalars, no heads, empty vmap, meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_attention import (
    attention,
    attention_reference,
    attention_varlen,
    attention_varlen_reference,
    explain,
)
from tolerances import assert_close


def qkv(*batch: int, heads: int = 4, heads_kv: int = 2, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((9, heads, 16), (13, heads_kv, 16), (13, heads_kv, 24))
    return [torch.randn(*batch, *shape, **options) for shape in shapes]


def offsets(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


SCALARS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": np.bool_(True)}, {"causal": True}),
    ({"scale": np.float32(0.5)}, {"scale": 0.5}),
    ({"scale": np.float16(0.5)}, {"scale": 0.5}),
    ({"scale": np.int64(1)}, {"scale": 1}),
    ({"softcap": np.float32(2)}, {"softcap": 2.0}),
    ({"window": (np.int64(3), np.uint8(2))}, {"window": (3, 2)}),
    ({"window": [None, np.int32(2)]}, {"window": (None, 2)}),
    ({"dropout_p": np.float32(0.5), "dropout_seed": np.int64(7)},
     {"dropout_p": 0.5, "dropout_seed": 7}),
    ({"deterministic": np.bool_(True), "return_lse": np.bool_(False)}, {"deterministic": True}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "meant"), SCALARS, ids=lambda value: " ".join(value))
def test_numpy_scalars(given: dict[str, Any], meant: dict[str, Any], device: str) -> None:
    tensors = qkv(2, device=device)
    leaves = [t.requires_grad_() for t in tensors]
    results = []
    for options in (given, meant):
        out = attention(*leaves, **options, backend="reference")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert str(explain(*tensors, **given)) == str(explain(*tensors, **meant))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_numpy_lengths(kind: Callable[[int], Any], device: str) -> None:
    q, k, v = qkv(device=device)
    ends = offsets(0, 5, 9, device=device), offsets(0, 8, 13, device=device)
    actual = attention_varlen(q, k, v, *ends, kind(5), kind(8), backend="reference")
    expected = attention_varlen(q, k, v, *ends, 5, 8, backend="reference")
    assert torch.equal(actual, expected)
    assert str(explain(q, k, v, *ends, kind(5), kind(8))) == str(explain(q, k, v, *ends, 5, 8))


@pytest.mark.parametrize("heads_kv", [0, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_no_heads(packed: bool, heads_kv: int, device: str) -> None:
    """Results without elements; gradients are zeros of every shape. So says the formula."""
    batch = () if packed else (2,)
    leaves = [t.requires_grad_() for t in qkv(*batch, heads=0, heads_kv=heads_kv, device=device)]
    sink = torch.randn(0, device=device, requires_grad=True)
    bias = torch.randn(9, 13, device=device, requires_grad=True)
    ends = (offsets(0, 9, device=device), offsets(0, 13, device=device)) if packed else ()
    options = {"sink": sink, "bias": bias, "causal": True, "return_lse": True, "dropout_p": 0.5,
               "alibi_slopes": torch.rand(0, device=device)}  # fmt: skip
    function = attention_varlen if packed else attention
    longest = (9, 13) if packed else ()
    out, lse = function(*leaves, *ends, *longest, **options, backend="reference")
    formula = attention_varlen_reference if packed else attention_reference
    for actual, expected in zip((out, lse), formula(*leaves, *ends, **options), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert lse.shape == ((0, 9) if packed else (2, 0, 9)) and out.shape[-2:] == (0, 24)
    inputs = [*leaves, sink, bias]
    for tensor, grad in zip(
        inputs, torch.autograd.grad(out.sum() + lse.sum(), inputs), strict=True
    ):
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.gpu
def test_no_heads_on_a_gpu() -> None:
    """No kernel is launched, whichever backend serves the call."""
    leaves = [
        t.requires_grad_() for t in qkv(2, heads=0, dtype=torch.bfloat16, device="cuda")
    ]  # fmt: skip
    out, lse = attention(*leaves, causal=True, return_lse=True)
    assert out.shape == (2, 9, 0, 24) and lse.shape == (2, 0, 9)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_vmap_over_nothing(device: str) -> None:
    """A mapped call over nothing has the right shapes without elements: the output, and gradients
    taken inside and outside of vmap."""
    some, none = qkv(2, 3, device=device), qkv(0, 3, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, causal=True, return_lse=True, backend="reference")

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = call(q, k, v)
        return out.square().sum() + lse.sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2))
    for transform in (torch.vmap(call), torch.vmap(grads)):
        for full, empty in zip(transform(*some), transform(*none), strict=True):
            assert empty.shape == (0, *full.shape[1:]) and empty.dtype == full.dtype

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(loss)(q, k, v).sum()

    for tensor, grad in zip(none, torch.func.grad(total, argnums=(0, 1, 2))(*none), strict=True):
        assert grad.shape == tensor.shape
    for tensor, grad in zip(some, torch.func.grad(total, argnums=(0, 1, 2))(*some), strict=True):
        assert grad.shape == tensor.shape and grad.isfinite().all() and grad.any()


def test_vmap_over_no_packed_call() -> None:
    q, k, v = qkv()
    ends = offsets(0, 5, 9), offsets(0, 8, 13)
    mapped = torch.vmap(lambda q, ends: attention_varlen(q, k, v, ends, ends, 9, 9))
    assert mapped(q.new_empty(0, *q.shape), offsets().reshape(0, 2)).shape == (0, 9, 4, 24)
    stacked = torch.vmap(lambda q: attention_varlen(q, k, v, *ends, 5, 8))(torch.stack([q, 2 * q]))
    for index, factor in enumerate((1, 2)):
        expected = attention_varlen(factor * q, k, v, *ends, 5, 8)
        assert_close(stacked[index], expected, "exact")


META_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.5},
    "all": {"causal": True, "window": (3, 4), "softcap": 2.0, "sink": torch.ones(4, device="meta"),
            "alibi_slopes": torch.ones(4, device="meta"),
            "bias": torch.ones(9, 13, device="meta")},
}  # fmt: skip


@pytest.mark.parametrize("options", META_OPTIONS.values(), ids=META_OPTIONS)
def test_the_formula_takes_meta_tensors(options: dict[str, Any]) -> None:
    """On the meta device the results have the shapes and dtypes of a real call, dense and
    packed."""
    dense = [t.half() for t in qkv(2, device="meta")]
    packed = [t.half() for t in qkv(device="meta")]
    ends = offsets(0, 5, 9), offsets(0, 8, 13)
    meta_ends = [t.to("meta") for t in ends]
    calls = (
        (attention_reference(*dense, return_lse=True, **options),
         attention(*dense, return_lse=True, **options)),
        (attention_varlen_reference(*packed, *ends, return_lse=True, **options),
         attention_varlen(*packed, *meta_ends, 9, 13, return_lse=True, **options)),
    )  # fmt: skip
    for formula, call in calls:
        for one, other in zip(formula, call, strict=True):
            assert one.is_meta and other.is_meta
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_the_formula_needs_the_values_of_cu_seqlens() -> None:
    packed, ends = qkv(device="meta"), offsets(0, 9, device="meta")
    with pytest.raises(ValueError, match="attention_varlen_reference: cu_seqlens are on meta"):
        attention_varlen_reference(*packed, ends, ends)
