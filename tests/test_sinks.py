"""Sinks on every row of the kernel tables, on a GPU, against the formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen, attention_varlen_reference
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_reference
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_it_is_chosen
from kernel_calls import (
    CASES,
    Case,
    case_inputs,
    offsets,
    options_for,
    packed_inputs,
    plain_pytorch,
)
from tolerances import (
    assert_as_accurate,
    assert_close,
    assert_near,
    assert_same_bits,
)

pytestmark = pytest.mark.gpu

row = fixture_of(ALL, skip_unless_it_is_chosen)
# In turn for the heads: usual ones, one that outweighs all keys, one that weighs nothing. All are
# exact in 16 bits, so that plain PyTorch has the same.
SINKS = (0.5, 4.0, -3.0, 12.0, 40.0, -200.0)


def sinks(heads: int) -> Tensor:
    return torch.tensor(SINKS, device="cuda").repeat(heads // len(SINKS) + 1)[:heads].contiguous()


def results(
    function: Any, tensors: tuple[Tensor, ...], grad_out: Tensor, grad_lse: Tensor
) -> dict[str, Tensor]:
    """Output and LSE of `function(q, k, v, sink)`, and the gradients of its arguments."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = function(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out.to(out.dtype), grad_lse.to(lse)))
    values = (out.detach(), lse.detach(), *grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), values, strict=True))


def exact_dsink(
    found: dict[str, Tensor], sink: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the sinks `[heads]` from the output and the LSE that a kernel found, in
    float64, and the sum of its terms' magnitudes. Shapes as of a dense call."""
    share = (sink.double()[:, None] - found["lse"].double()).exp()
    products = (grad_out.double() * found["out"].double()).transpose(1, 2)
    terms = share * (grad_lse.double() - products.sum(-1))
    magnitudes = share * (grad_lse.double().abs() + products.abs().sum(-1))
    return terms.sum((0, 2)), magnitudes.sum((0, 2))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_accuracy(row: rows.TableRow, case: Case) -> None:
    """Output, LSE and all gradients; those of an sm90 row come from the backward that serves it."""
    options = options_for(row, case.options, case.heads)
    inputs, sink = case_inputs(row, case), sinks(case.heads)
    grad_out = torch.randn(case.batch, case.seqlen_q, case.heads, row.head_dim_v, device="cuda").to(
        DTYPES[row.dtype]
    )
    grad_lse = torch.randn(case.batch, case.heads, case.seqlen_q, device="cuda")

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return attention(q, k, v, sink=sink, backend=backend_of(row), return_lse=True, **options)

    def exact(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return attention_reference(q, k, v, sink=sink, return_lse=True, **options)

    def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return plain_pytorch(q, k, v, {"sink": sink, **options})

    found = results(ours, (*inputs, sink), grad_out, grad_lse)
    wide = tuple(tensor.double() for tensor in (*inputs, sink))
    expected = results(exact, wide, grad_out, grad_lse)
    pytorch = results(plain, (*inputs, sink), grad_out, grad_lse)
    assert_close(found["lse"], expected["lse"].float(), "large_scores", name="lse")
    # With one key, dS = P (dP - rowsum(dO O)) = P (1 - P) dP: two nearly equal terms. One of them
    # is computed from the output as it was rounded to 16 bits, which plain PyTorch does not use: of
    # each product at most half an ulp, which add up like random numbers.
    slack = {}
    if case.seqlen_k == 1:
        assert case.heads == case.heads_kv
        products = grad_out.double() * expected["out"]
        left = 2 * torch.finfo(DTYPES[row.dtype]).eps * products.norm(dim=-1, keepdim=True)
        left *= options.get("scale", row.head_dim**-0.5)
        slack = {"dq": left * wide[1].abs(), "dk": (left * wide[0]).norm(dim=1, keepdim=True)}
    for name in ("out", "dq", "dk", "dv"):
        plain_value = pytorch[name].nan_to_num()
        assert_as_accurate(found[name], expected[name], plain_value, name, slack=slack.get(name))
    dsink, magnitudes = exact_dsink(found, sink, grad_out, grad_lse)
    # Its terms hold the output, which was rounded twice: as probabilities, and as it was stored.
    rounding = torch.finfo(DTYPES[row.dtype]).eps * magnitudes + 1e-30
    assert bool(((found["dsink"] - expected["dsink"]).abs() <= rounding).all())
    assert bool(((found["dsink"] - dsink).abs() <= 1e-4 * magnitudes + 1e-30).all())


def test_packed(row: rows.TableRow) -> None:
    """Empty sequences, sequences without keys, and NaN in the rows of no sequence."""
    options = options_for(row, {"causal": True}, 6)
    lengths_q, lengths_k = [0, 5, 130, 0, 257, 64, 9], [3, 0, 200, 0, 129, 64, 0]
    ends = offsets(lengths_q), offsets(lengths_k)
    total_q, total_k, heads, padding = sum(lengths_q), sum(lengths_k), 6, 50
    q, k, v = packed_inputs(row, (total_q, total_k), (heads, 2), padding)
    sink = sinks(heads)
    grad_out = torch.randn(total_q + padding, heads, row.head_dim_v, device="cuda").to(q.dtype)
    grad_lse = torch.randn(heads, total_q + padding, device="cuda")
    grad_out[total_q:], grad_lse[:, total_q:] = math.nan, math.nan

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return attention_varlen(
            q, k, v, *ends, 257, 200, sink=sink, backend=backend_of(row), return_lse=True,
            **options,
        )  # fmt: skip

    def exact(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return attention_varlen_reference(q, k, v, *ends, sink=sink, return_lse=True, **options)

    found = results(ours, (q, k, v, sink), grad_out, grad_lse)
    assert bool(found["out"][total_q:].eq(0).all())
    assert bool(found["lse"][:, total_q:].isneginf().all())
    for name, total in (("dq", total_q), ("dk", total_k), ("dv", total_k)):
        assert bool(found[name][total:].eq(0).all()), name
    inputs = q[:total_q], k[:total_k], v[:total_k], sink
    grads = grad_out[:total_q], grad_lse[:, :total_q]
    expected = results(exact, tuple(t.double() for t in inputs), *grads)
    assert_close(found["lse"][:, :total_q], expected["lse"].float(), "rounding", name="lse")
    for name, total in (("out", total_q), ("dq", total_q), ("dk", total_k), ("dv", total_k)):
        assert_near(found[name][:total], expected[name], name, 2**-6)
    mine = {"out": found["out"][None, :total_q], "lse": found["lse"][None, :, :total_q]}
    dsink, magnitudes = exact_dsink(mine, sink, grads[0][None], grads[1][None])
    assert bool(((found["dsink"] - dsink).abs() <= 1e-4 * magnitudes + 1e-30).all())


def test_a_sink_of_minus_infinity_is_none(row: rows.TableRow) -> None:
    q, k, v = case_inputs(row, CASES["gqa"])
    options = options_for(row, {"causal": True, "return_lse": True, "backend": backend_of(row)}, 6)
    sink = torch.full((6,), -math.inf, device="cuda")
    for name, a, b in zip(
        ("out", "lse"),
        attention(q, k, v, sink=sink, **options),
        attention(q, k, v, **options),
        strict=True,
    ):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("seqlen_q", [1, 7, 300])
def test_gradient_repeats_bitwise(row: rows.TableRow, seqlen_q: int) -> None:
    """That of the sinks, whether or not determinism is asked for: short sequences of a large batch
    and long ones."""
    if row.arch == "sm90":
        pytest.skip("the backward of another row")
    batch = 2000 // seqlen_q
    case = Case(batch, seqlen_q, 100, 4, 2, {})
    q, k, v = case_inputs(row, case)
    sink = sinks(4).requires_grad_()
    out, lse = attention(
        q, k, v, sink=sink, backend=row.arch, return_lse=True, **options_for(row, {}, 4)
    )
    grads = torch.randn_like(out), torch.randn_like(lse)
    (first,) = torch.autograd.grad((out, lse), (sink,), grads, retain_graph=True)
    for _ in range(20):
        (again,) = torch.autograd.grad((out, lse), (sink,), grads, retain_graph=True)
        assert torch.equal(first, again)
    found = {"out": out.detach(), "lse": lse.detach()}
    dsink, magnitudes = exact_dsink(found, sink.detach(), *grads)
    assert bool(((first - dsink).abs() <= 1e-4 * magnitudes + 1e-30).all())


@pytest.mark.parametrize("strides", ["every other", "one for all"])
def test_sinks_of_any_strides(row: rows.TableRow, strides: str) -> None:
    q, k, v = case_inputs(row, CASES["gqa"])
    options = options_for(row, {"backend": backend_of(row)}, 6)
    sink = torch.randn(12, device="cuda")[::2]
    if strides == "one for all":
        sink = torch.randn(1, device="cuda").expand(6)
    expected = attention(q, k, v, sink=sink.contiguous(), **options)
    assert_same_bits(attention(q, k, v, sink=sink, **options), expected, "out")
