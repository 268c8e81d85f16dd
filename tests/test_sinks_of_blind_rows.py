"""The LSE of a row that sees no key is its sink, so the LSE's gradient there is the sink's: of the
reference backend, and of each row of the kernel tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.bench.roundings import exact
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_it_is_chosen
from kernel_calls import offsets, options_for

row = fixture_of(ALL, skip_unless_it_is_chosen)
HEADS, HEADS_KV = 6, 2
# Why no key is seen: (queries, keys) of each sequence, options, and how many rows of each see none.
DENSE: dict[str, tuple[int, int, dict[str, Any], int]] = {
    "no keys": (70, 0, {}, 70),
    "one row without keys": (1, 0, {}, 1),
    "causal": (150, 60, {"causal": True}, 90),
    "window": (150, 60, {"window": (200, 3)}, 87),
    "causal in a window": (33, 1, {"causal": True, "window": (5, 5)}, 32),
}
PACKED: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "no keys": ([(70, 0), (0, 5), (3, 0)], {}),
    "some without keys": ([(10, 0), (8, 15), (129, 0), (64, 64)], {}),
    "causal": ([(130, 20), (5, 0), (64, 64)], {"causal": True}),
}


def blind_of(lengths: tuple[int, int], options: dict[str, Any]) -> int:
    queries, keys = lengths
    return queries if not keys else max(queries - keys, 0) if options.get("causal") else 0


def tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


def assert_flows(function: Any, leaves: list[Tensor], blind: Tensor) -> None:
    """`function(q, k, v, sink)` returns an LSE; `blind` says which of its elements see no key. A
    gradient of these alone goes to the sink alone."""
    lse = function(*leaves)
    sink = leaves[3].detach()
    assert torch.equal(lse.detach()[blind], sink[:, None].expand_as(lse)[blind])
    grad = torch.randn_like(lse).masked_fill(~blind, 0.0)
    *others, dsink = torch.autograd.grad(lse, leaves, grad)
    dims = [axis for axis in range(lse.dim()) if axis != lse.dim() - 2]
    expected = grad.double().sum(dims)
    slack = 1e-5 * grad.double().abs().sum(dims)
    assert bool(((dsink - expected).abs() <= slack).all())
    assert not any(bool(other.any()) for other in others)


def check_dense(case: str, options: dict[str, Any], where: tuple[Any, ...]) -> None:
    queries, keys, own, many = DENSE[case]
    dtype, dim, dim_v, device = where
    shapes = [(2, queries, HEADS, dim), (2, keys, HEADS_KV, dim), (2, keys, HEADS_KV, dim_v)]
    blind = torch.zeros(2, HEADS, queries, dtype=torch.bool, device=device)
    blind[..., :many] = True
    leaves = [*tensors(shapes, dtype, device), *tensors([(HEADS,)], torch.float32, device)]

    def lse(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return attention(q, k, v, sink=sink, return_lse=True, **{**options, **own})[1]

    assert_flows(lse, leaves, blind)


def check_packed(case: str, options: dict[str, Any], where: tuple[Any, ...]) -> None:
    pairs, own = PACKED[case]
    dtype, dim, dim_v, device = where
    queries, keys = map(list, zip(*pairs, strict=True))
    shapes = [
        (sum(queries), HEADS, dim), (sum(keys), HEADS_KV, dim), (sum(keys), HEADS_KV, dim_v),
    ]  # fmt: skip
    rows = [torch.arange(q) < blind_of((q, k), own) for q, k in pairs]
    blind = torch.cat(rows).expand(HEADS, -1).to(device)
    leaves = [*tensors(shapes, dtype, device), *tensors([(HEADS,)], torch.float32, device)]
    ends = [offsets(each, device) for each in (queries, keys)]

    def lse(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        sizes = max(queries), max(keys)
        every = {**options, **own, "return_lse": True, "sink": sink}
        return attention_varlen(q, k, v, *ends, *sizes, **every)[1]

    assert_flows(lse, leaves, blind)


ON_CPU = torch.float32, 16, 24, "cpu"


@pytest.mark.parametrize("case", DENSE)
def test_reference(case: str) -> None:
    check_dense(case, {"backend": "reference"}, ON_CPU)


@pytest.mark.parametrize("case", PACKED)
def test_reference_packed(case: str) -> None:
    check_packed(case, {"backend": "reference"}, ON_CPU)


def test_what_a_bias_hides() -> None:
    hides_all(torch.float32, {"backend": "reference"}, 16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", DENSE)
def test_kernels(row: Any, case: str) -> None:
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    check_dense(case, options, (DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED)
def test_kernels_packed(row: Any, case: str) -> None:
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    check_packed(case, options, (DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"))


@pytest.mark.gpu
def test_what_a_bias_hides_from_kernels(row: Any) -> None:
    if "bias" not in row.score_mods:
        pytest.skip("a row without a bias")
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    hides_all(DTYPES[row.dtype], options, row.head_dim, "cuda", row.head_dim_v)


def hides_all(
    dtype: torch.dtype, options: dict[str, Any], dim: int, device: str, dim_v: int = 0
) -> None:
    """A bias of -inf in whole rows."""
    shapes = [(2, 40, HEADS, dim), (2, 90, HEADS_KV, dim), (2, 90, HEADS_KV, dim_v or dim)]
    leaves = [*tensors(shapes, dtype, device), *tensors([(HEADS,)], torch.float32, device)]
    bias = torch.zeros(40, 90, dtype=dtype, device=device)
    bias[7:30] = -math.inf
    blind = torch.zeros(2, HEADS, 40, dtype=torch.bool, device=device)
    blind[..., 7:30] = True

    def lse(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        every = {**options, "bias": bias, "return_lse": True, "sink": sink}
        return attention(q, k, v, **every)[1]

    assert_flows(lse, leaves, blind)


def test_the_formula_of_errors_has_it_too() -> None:
    """`exact` of calls without keys, with all that changes scores."""
    q, k, v, grad = tensors([(2, 5, 6, 16), (2, 0, 2, 16), (2, 0, 2, 8), (2, 5, 6, 8)],
                            torch.bfloat16, "cpu")  # fmt: skip
    grad_lse, sink = torch.randn(2, 6, 5), torch.randn(6)
    right = exact(q, k, v, grad, sink=sink, grad_lse=grad_lse, bias=torch.zeros(6, 5, 0),
                  softcap=2.0, alibi_slopes=torch.rand(6))  # fmt: skip
    torch.testing.assert_close(right.values["dsink"], grad_lse.double().sum((0, 2)))
    expected = sink.double()[:, None].expand(2, 6, 5)
    torch.testing.assert_close(right.values["lse"], expected)
    assert not right.values["out"].any()
