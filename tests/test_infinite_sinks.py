"""A sink of +inf has all the weight of its head: output 0, LSE +inf, and of the gradients only that
of the LSE, which the sink gets. Of the formula, the reference backend, `merge_attention`, calls
with a cache, and each row of the kernel tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_reference, attention_varlen
from cute_attention.inference import attention_with_cache, merge_attention
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_it_is_chosen
from kernel_calls import offsets, options_for
from tolerances import assert_same_bits

row = fixture_of(ALL, skip_unless_it_is_chosen)
HEADS, HEADS_KV = 6, 2
WHOLE = (1, 4)  # the heads with such a sink; 3e38 in base 2 is infinite, too
SINKS = (0.5, math.inf, -math.inf, -3.0, 3e38, 2.0)
# (queries, keys) and options: rows that see keys, that see none, splits of the keys, one key.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full": (70, 150, {}),
    "causal": (150, 60, {"causal": True}),
    "no keys": (5, 0, {}),
    "one key": (9, 1, {}),
    "few queries": (1, 900, {}),
}


def differentiated(function: Callable[..., Any], leaves: list[Tensor]) -> dict[str, Tensor]:
    out, lse = function(*leaves)
    torch.manual_seed(3)
    grads = torch.randn_like(out), torch.randn_like(lse)
    values = torch.autograd.grad((out, lse), leaves, grads)
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    found = dict(zip(names, (out.detach(), lse.detach(), *values), strict=True))
    return found | {"grad_lse": grads[1]}


def inputs(queries: int, keys: int, where: tuple[Any, ...]) -> list[Tensor]:
    dtype, dim, dim_v, device = where
    torch.manual_seed(1)
    shapes = [(2, queries, HEADS, dim), (2, keys, HEADS_KV, dim), (2, keys, HEADS_KV, dim_v)]
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return [*leaves, torch.tensor(SINKS, device=device).requires_grad_()]


def assert_whole(found: dict[str, Tensor]) -> None:
    """Of `WHOLE` heads what such a sink says, and of no other head anything that is NaN."""
    for name, value in found.items():
        assert not value.isnan().any(), name
    whole = list(WHOLE)
    assert not found["out"][:, :, whole].any()
    assert not found["dq"][:, :, whole].any()
    lse = found["lse"][:, whole]
    assert bool((lse == torch.tensor(SINKS, device=lse.device)[whole][:, None]).all())
    torch.testing.assert_close(
        found["dsink"][whole], found["grad_lse"].sum((0, 2)).to(found["dsink"])[whole]
    )


def check_dense(case: str, options: dict[str, Any], where: tuple[Any, ...]) -> None:
    """The other heads have the results of a call in which all sinks are finite; the gradients of K
    and V are those of the other heads alone."""
    queries, keys, own = CASES[case]
    leaves = inputs(queries, keys, where)

    def call(*tensors: Tensor) -> Any:
        every = {**options, **own, "return_lse": True, "sink": tensors[3]}
        return attention(*tensors[:3], **every)

    found = differentiated(call, leaves)
    assert_whole(found)
    usual = leaves[3].detach().clone()
    usual[list(WHOLE)] = 0.0
    expected = differentiated(call, [*leaves[:3], usual.requires_grad_()])
    others = [head for head in range(HEADS) if head not in WHOLE]
    for name in ("out", "dq"):
        assert_same_bits(found[name][:, :, others], expected[name][:, :, others], name)
    assert_same_bits(found["lse"][:, others], expected["lse"][:, others], "lse")
    assert_same_bits(found["dsink"][others], expected["dsink"][others], "dsink")


@pytest.mark.parametrize("case", CASES)
def test_reference(case: str) -> None:
    check_dense(case, {"backend": "reference"}, (torch.float32, 16, 24, "cpu"))


@pytest.mark.parametrize("case", CASES)
def test_the_formula_has_the_results_of_the_reference(case: str) -> None:
    queries, keys, own = CASES[case]
    leaves = inputs(queries, keys, (torch.float32, 16, 24, "cpu"))
    found, expected = (
        differentiated(
            lambda q, k, v, sink, f=function: f(q, k, v, sink=sink, return_lse=True, **own), leaves
        )
        for function in (attention, attention_reference)
    )
    assert_whole(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_the_formula() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 4, requires_grad=True).double() for n in (3, 4, 4))
    sink = torch.tensor([math.inf, 0.3], dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda *tensors: attention_reference(*tensors, sink=sink), (q, k, v)
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_with_a_cache(batch_invariant: bool) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 2, 32, HEADS_KV, 16).unbind()
    out, lse = attention_with_cache(
        torch.randn(2, 3, HEADS, 16), k_cache, v_cache, 20, sink=torch.tensor(SINKS), causal=True,
        return_lse=True, batch_invariant=batch_invariant,
    )  # fmt: skip
    assert not out[:, :, list(WHOLE)].any() and not out.isnan().any()
    assert bool(lse[:, 1].isposinf().all()) and bool((lse[:, 4] == 3e38).all())


def test_merging_parts() -> None:
    """The part with the sink has all the weight; two share it."""
    q, k, v, sink = inputs(5, 12, (torch.float64, 16, 16, "cpu"))
    whole = attention(q, k, v, sink=sink, return_lse=True)
    parts = [
        attention(q, k[:, place], v[:, place], sink=own, return_lse=True)
        for place, own in ((slice(0, 5), sink), (slice(5, 12), None))
    ]
    merged = merge_attention(*zip(*parts, strict=True))
    for name, one, other in zip(("out", "lse"), merged, whole, strict=True):
        torch.testing.assert_close(one, other, msg=name)
    outs = torch.tensor([2.0, 4.0, 9.0]).view(3, 1, 1, 1, 1).requires_grad_()
    lses = torch.tensor([math.inf, math.inf, 5.0]).view(3, 1, 1, 1).requires_grad_()
    out, lse = merge_attention(outs, lses)
    assert out.item() == 3.0 and lse.item() == math.inf
    douts, dlses = torch.autograd.grad((out.sum(), lse.sum()), (outs, lses))
    assert douts.flatten().tolist() == dlses.flatten().tolist() == [0.5, 0.5, 0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["causal", "one key", "few queries"])
def test_kernels(row: Any, case: str) -> None:
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    check_dense(
        case, {"deterministic": True, **options},
        (DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"),
    )  # fmt: skip


@pytest.mark.gpu
def test_kernels_of_packed_sequences(row: Any) -> None:
    """With rows behind the last, which give a sink nothing."""
    options = options_for(row, {"backend": backend_of(row), "causal": True}, HEADS)
    queries, keys, padding = [130, 5, 64], [20, 0, 64], 40
    where = DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"
    q, k, v = (
        t[0].detach() for t in inputs(sum(queries) + padding, sum(keys) + padding, where)[:3]
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    leaves.append(torch.tensor(SINKS, device="cuda").requires_grad_())
    ends = offsets(queries), offsets(keys)

    def call(*tensors: Tensor) -> Any:
        every = {**options, "sink": tensors[3], "return_lse": True}
        return attention_varlen(*tensors[:3], *ends, max(queries), max(keys), **every)

    found = differentiated(call, leaves)
    for name, value in found.items():
        assert not value.isnan().any(), name
    expected = found["grad_lse"][:, : sum(queries)].sum(1)
    torch.testing.assert_close(found["dsink"][list(WHOLE)], expected[list(WHOLE)])
