"""A bias and its gradient on every row that computes it, on a GPU: what the tests of all rows leave
out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_calls
from cute_attention import attention, attention_varlen, explain
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_reference, attention_varlen_reference
from every_row import (
    ALL,
    DTYPES,
    LIMIT,
    backend_of,
    fixture_of,
    run_on_small_chip,
    skip_unless_one_feature_chooses_it,
)
from kernel_calls import (
    assert_all_as_accurate,
    in_float64,
    in_pytorch,
    inputs_of,
    offsets,
    shape_of_bias,
)
from other_tiles import assert_differ_by_roundings, has_either_step, variances
from tolerances import ACCURACY_FACTOR, assert_close, assert_near, assert_same_bits

pytestmark = pytest.mark.gpu

ROWS = [row for row in ALL if "bias" in row.score_mods]
row = fixture_of(ROWS, skip_unless_one_feature_chooses_it)
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
BATCH, QUERIES, KEYS, HEADS = 3, 150, 203, 6
KEPT = ["bhqk", "hqk", "bqk", "qk", "bhk", "hk", "bk", "k", "bhq", "q", "h", ""]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (40, 17)}}


def shape_of(kept: str) -> tuple[int, ...]:
    return shape_of_bias(kept, BATCH, HEADS, QUERIES, KEYS)


def results(
    function: Any, tensors: list[Tensor], bias: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Output, LSE, and the gradients of q, k, v and the bias."""
    return kernel_calls.results(function, tensors, {"bias": bias}, **options)


def assert_exact(
    row: rows.TableRow,
    tensors: list[Tensor],
    bias: Tensor,
    options: dict[str, Any],
    factor: float = ACCURACY_FACTOR,
) -> None:
    found = results(attention, tensors, bias, backend=backend_of(row), **options)
    exact = in_float64(tensors, {"bias": bias}, **options)
    pytorch = in_pytorch(tensors, {"bias": bias}, **options)
    if bias.shape[-1] == 1:  # the same for all keys of a query: it changes no probability
        assert_nothing_is_left(found.pop("dbias"), found["out"], tensors[3])
    for name in found.keys() - {"lse"}:
        assert found[name].dtype == (bias if name == "dbias" else tensors[0]).dtype
    assert_all_as_accurate(found, exact, pytorch, factor=factor)


def assert_nothing_is_left(grad: Tensor, out: Tensor, grad_out: Tensor) -> None:
    """dS of a query sums to 0, but for what the rounding of its output leaves in delta, the sum of
    dO O: of each product at most half an ulp, which add up like random numbers."""
    products = (grad_out.float() * out.float()).square().sum(-1).transpose(1, 2)[..., None]
    left = torch.finfo(out.dtype).eps * products.sum_to_size(grad.shape).sqrt()
    assert (grad.abs() <= 4 * left).all()


def test_the_row_and_its_gradient_are_chosen(row: rows.TableRow) -> None:
    q, k, v, _ = inputs_of(row, 1, (70, 70), (2, 2))
    bias = torch.zeros(70, 70, device="cuda", requires_grad=True)
    answer = explain(q.requires_grad_(), k, v, bias=bias, backend=backend_of(row))
    reports = answer.forward if row.direction == "forward" else answer.backward
    report = next(report for report in reports if report.backend == row.arch)
    assert [candidate.name for candidate in report.rows if candidate.chosen] == [row.name]


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kept", KEPT)
def test_broadcasts(row: rows.TableRow, kept: str, options: dict[str, Any]) -> None:
    """Every broadcast, with grouped heads."""
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, 2))
    bias = torch.randn(shape_of(kept), device="cuda").to(DTYPES[row.dtype]) * 2
    assert_exact(row, tensors, bias, options)


@pytest.mark.parametrize("kept", ["bhqk", "hk", "q"])
def test_float32(row: rows.TableRow, kept: str) -> None:
    """A bias in fp32 is not rounded: numbers of 1000 whose small differences matter."""
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, HEADS))
    small = torch.randn(shape_of(kept), device="cuda")
    options = {"causal": True, "backend": backend_of(row)}
    found = results(attention, tensors, small + 1000, **options)
    exact = results(
        attention_reference,
        [t.double() for t in tensors],
        (small + 1000).double(),
        causal=True,
    )
    rounded = results(attention, tensors, (small + 1000).to(tensors[0].dtype), **options)
    assert found["dbias"].dtype == torch.float32
    for name in ("out", "dbias"):
        close, far = (
            (found_in[name].double() - exact[name]).abs().mean() for found_in in (found, rounded)
        )
        assert close < 0.25 * far or kept == "q", name


def laid_out(bias: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides, and NaN beside them."""
    batch, heads, queries, keys = bias.shape
    if layout == "odd rows":
        wide = bias.new_full((batch, heads, queries, keys + 8 - keys % 2), torch.nan)
        wide[..., 1 : keys + 1] = bias
        return wide[..., 1 : keys + 1]
    if layout == "transposed":
        return bias.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "heads last":
        return bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert layout == "heads outside"
    return bias.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", ["odd rows", "transposed", "heads last", "heads outside"])
def test_strides(row: rows.TableRow, layout: str) -> None:
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, HEADS))
    bias = torch.randn(shape_of("bhqk"), device="cuda").to(DTYPES[row.dtype])
    options = {"causal": True, "backend": backend_of(row), "deterministic": True}
    expected = results(attention, tensors, bias, **options)
    found = results(attention, tensors, laid_out(bias, layout), **options)
    for name in NAMES:
        assert_same_bits(found[name], expected[name], name)


def test_expanded(row: rows.TableRow) -> None:
    """A bias that the caller expanded has strides of 0, and a gradient of its whole shape. The
    backward does not store that."""
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, HEADS))
    narrow = torch.randn(shape_of("h"), device="cuda").to(DTYPES[row.dtype])
    whole = narrow.expand(shape_of("bhqk")).contiguous()
    options = {"backend": backend_of(row), "deterministic": True}
    expected = results(attention, tensors, whole, **options)
    found = results(attention, tensors, narrow.expand(shape_of("bhqk")), **options)
    if has_either_step(row):
        own = variances(tensors, whole, DTYPES[row.dtype])
        assert_differ_by_roundings(found, expected, {name: own[name] for name in NAMES[2:]})
        return
    for name in NAMES:
        assert_same_bits(found[name], expected[name], name)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_minus_infinity_hides(row: rows.TableRow, options: dict[str, Any]) -> None:
    """Single keys, whole queries, and whole tiles."""
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, 2))
    bias = torch.randn(shape_of("bhqk"), device="cuda").to(DTYPES[row.dtype])
    bias[torch.rand_like(bias, dtype=torch.float) < 0.3] = -torch.inf
    bias[:, :, 5] = bias[:, :, 130:] = -torch.inf
    bias[:, 1, :, :192] = -torch.inf
    bias[:, 2, :, 64:] = -torch.inf
    bias[2] = -torch.inf
    assert_exact(row, tensors, bias, options)


def test_what_the_mask_hides_may_be_anything(row: rows.TableRow) -> None:
    """NaN and infinities where no query sees the key, or another sequence would be."""
    tensors = inputs_of(row, BATCH, (QUERIES, QUERIES), (HEADS, HEADS))
    shape = (BATCH, HEADS, QUERIES, QUERIES)
    bias = torch.randn(shape, device="cuda").to(DTYPES[row.dtype])
    hidden = torch.ones(QUERIES, QUERIES, device="cuda", dtype=torch.bool).triu(1)
    options = {"causal": True, "backend": backend_of(row), "deterministic": True}
    expected = results(attention, tensors, bias.masked_fill(hidden, 0.0), **options)
    for anything in (torch.nan, torch.inf, -torch.inf):
        found = results(attention, tensors, bias.masked_fill(hidden, anything), **options)
        for name in NAMES:
            assert_same_bits(found[name], expected[name], name)
        assert not found["dbias"].masked_select(hidden).any()


@pytest.mark.parametrize("kept", ["bhqk", "hqk", "bk", ""])
def test_packed(row: rows.TableRow, kept: str) -> None:
    """Sequence b has the first rows and columns of bias[b]; the rest may be anything."""
    lengths_q, lengths_k = (150, 0, 37), (203, 64, 0)
    cu = offsets(lengths_q), offsets(lengths_k)
    dense = inputs_of(row, 1, (sum(lengths_q) + 5, sum(lengths_k) + 9), (HEADS, 2))
    tensors = [tensor[0] for tensor in dense]
    bias = torch.randn(shape_of(kept), device="cuda").to(DTYPES[row.dtype])
    if kept == "bhqk":
        bias[1:] = torch.nan  # these see no key
    found = results(
        lambda *args, **more: attention_varlen(*args, *cu, QUERIES, KEYS, **more),
        tensors, bias, causal=True, backend=backend_of(row),
    )  # fmt: skip
    exact = results(
        lambda *args, **more: attention_varlen_reference(*args, *cu, **more),
        [t.double() for t in tensors], bias.nan_to_num().double(), causal=True,
    )  # fmt: skip
    assert_close(found["lse"], exact["lse"].float(), "large_scores", name="lse")
    names = ["out", "dq", "dk", "dv", "dbias"]
    if bias.shape[-1] == 1:
        names.remove("dbias")
        assert_nothing_is_left(found["dbias"], found["out"][None], tensors[3][None])
    for name in names:
        assert found[name].isfinite().all(), name
        assert_near(found[name], exact[name], name)


def test_gradient_is_repeatable_and_alone(row: rows.TableRow) -> None:
    """Bitwise the same in every run without being asked; and other gradients do not depend on
    whether it is computed."""
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, 2))
    bias = torch.randn(shape_of("hqk"), device="cuda").to(DTYPES[row.dtype])
    options = {"causal": True, "backend": backend_of(row), "deterministic": True}
    first = results(attention, tensors, bias, **options)
    for _ in range(20):
        again = results(attention, tensors, bias, **options)
        assert_same_bits(again["dbias"], first["dbias"], "dbias")
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = attention(*leaves, bias=bias, **options)
    for name, grad in zip(NAMES[2:5], torch.autograd.grad(out, leaves, tensors[3]), strict=True):
        assert_same_bits(grad, first[name], name)


@pytest.mark.parametrize("kept", ["hqk", "k"])
def test_a_tile_is_read_before_the_next_takes_its_place(row: rows.TableRow, kept: str) -> None:
    """CTAs that go through their buffers of the bias many times, with nobody to wait for, give the
    same bits in every run."""
    batch, seqlen, heads = 6, 1030, 4
    q, k, v, _ = inputs_of(row, batch, (seqlen, seqlen), (heads, heads))
    shape = shape_of_bias(kept, batch, heads, seqlen, seqlen)
    bias = torch.randn(shape, device="cuda").to(DTYPES[row.dtype])
    options: dict[str, Any] = {"bias": bias, "causal": True, "backend": backend_of(row)}
    first = attention(q, k, v, return_lse=True, **options)
    for _ in range(100):
        again = attention(q, k, v, return_lse=True, **options)
        for found, expected, name in zip(again, first, NAMES[:2], strict=True):
            assert_same_bits(found, expected, name)


def test_with_a_sink_and_the_gradient_of_the_lse(row: rows.TableRow) -> None:
    tensors = inputs_of(row, BATCH, (QUERIES, KEYS), (HEADS, 2))
    bias = torch.randn(shape_of("hqk"), device="cuda")
    sink = torch.randn(HEADS, device="cuda")

    def gradients(function: Any, wide: bool, **options: Any) -> tuple[Tensor, ...]:
        leaves = [t.double() if wide else t for t in (*tensors[:3], bias, sink)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out, lse = function(*leaves[:3], bias=leaves[3], sink=leaves[4], return_lse=True, **options)
        grad_lse = torch.linspace(-1, 1, lse.numel(), device="cuda").view_as(lse)
        return torch.autograd.grad((out, lse), leaves, (tensors[3].to(out.dtype), grad_lse.to(lse)))

    found = gradients(attention, False, backend=backend_of(row))
    exact = gradients(attention_reference, True)
    for name, a, b in zip(("q", "k", "v", "bias", "sink"), found, exact, strict=True):
        assert_near(a, b, name)


def test_memory_of_the_gradient(row: rows.TableRow) -> None:
    """A bias for all sequences: nothing of the size [batch, heads, seqlen_q, seqlen_k]."""
    batch, seqlen, heads = 8, 1024, 4
    tensors = inputs_of(row, batch, (seqlen, seqlen), (heads, heads))
    bias = torch.randn(1, heads, seqlen, seqlen, device="cuda").to(DTYPES[row.dtype])

    def peak(bias: Tensor | None) -> int:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        out = attention(*leaves, bias=bias, backend=backend_of(row))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(tensors[3])
        return torch.cuda.max_memory_allocated() - before

    peak(bias)
    without, with_gradient = peak(bias), peak(bias.detach().requires_grad_())
    assert with_gradient - without <= bias.numel() * bias.element_size() + 2**20


def test_more_than_two_to_the_31_elements(row: rows.TableRow) -> None:
    """The last head of a bias whose elements 32 bits do not count."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of GPU memory")
    seqlen, heads, last = 32768, 3, 256
    tensors = inputs_of(row, 1, (seqlen, seqlen), (heads, heads))
    dtype = DTYPES[row.dtype]
    bias = torch.zeros(1, heads, seqlen, seqlen, device="cuda", dtype=dtype)
    bias[:, :, -last:] = torch.randn(1, heads, last, seqlen, device="cuda").to(dtype)
    assert bias.numel() > 2**31
    found = results(attention, tensors, bias, backend=backend_of(row))
    q, k, v, grad = (t[:, :, -1:].double() for t in tensors)
    exact = results(
        attention_reference, [q[:, -last:], k, v, grad[:, -last:]], bias[:, -1:, -last:].double()
    )
    for name in ("out", "dq"):
        assert_close(found[name][:, -last:, -1:].double(), exact[name], "large_scores", dtype, name)
    assert_near(found["dbias"][:, -1:, -last:], exact["dbias"], "dbias")


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(ROWS, [__file__])
