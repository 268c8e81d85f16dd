"""Packed tensors with rows of no sequence, and a `max_seqlen` that is too small."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention_varlen, attention_varlen_reference, explain
from kernel_calls import offsets
from tolerances import assert_close

LENGTHS_Q, LENGTHS_K, PADDING = (70, 0, 129, 3), (150, 4, 129, 60), 45
ROWS, KEYS = sum(LENGTHS_Q), sum(LENGTHS_K)
LONGEST = max(LENGTHS_Q), max(LENGTHS_K)
# Lengths for a max_seqlen that is too small. They take up to five tiles of 128, and the grid has
# fewer.
LONG_Q, LONG_K = (70, 0, 629, 3, 0, 40), (150, 4, 129, 500, 300, 0)


def padded(
    device: str, dtype: torch.dtype, total_q: int = ROWS, total_k: int = KEYS
) -> list[Tensor]:
    """q, k and v with NaN in every row of no sequence."""
    torch.manual_seed(0)
    tensors = []
    for rows, heads in ((total_q, 4), (total_k, 2), (total_k, 2)):
        tensor = torch.full((rows + PADDING, heads, 64), math.nan, device=device, dtype=dtype)
        tensor[:rows] = torch.randn(rows, heads, 64).to(device, dtype)
        tensors.append(tensor)
    return tensors


def results(
    function: Callable[..., Any], tensors: list[Tensor], *arguments: Any, **options: Any
) -> list[Tensor]:
    """Output, LSE and gradients, that of the sink among them. The gradients that come in are NaN in
    the rows of no sequence."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if "sink" in options:
        options["sink"] = options["sink"].clone().requires_grad_()
        leaves.append(options["sink"])
    out, lse = function(*leaves[:3], *arguments, return_lse=True, **options)
    torch.manual_seed(1)
    # Drawn for all rows, so that a row gets the same numbers with padding and without it.
    grad_out = torch.randn(ROWS + PADDING, *out.shape[1:])[: out.shape[0]].to(out)
    grad_lse = torch.randn(lse.shape[0], ROWS + PADDING)[:, : lse.shape[1]].to(lse)
    grad_out[ROWS:], grad_lse[:, ROWS:] = math.nan, math.nan
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    return [out.detach(), lse.detach(), *grads]


def assert_padding_is_empty(found: list[Tensor]) -> None:
    """In rows of no sequence the output is 0, the LSE -inf and the gradients 0, and nothing is
    NaN."""
    out, lse, dq, dk, dv, *rest = found
    assert not any(t.isnan().any() for t in (out, lse, dq, dk, dv, *rest))
    assert lse[:, ROWS:].isneginf().all() and lse[:, :ROWS].isfinite().all()
    for tensor, rows in ((out, ROWS), (dq, ROWS), (dk, KEYS), (dv, KEYS)):
        assert tensor[rows:].shape[0] == PADDING and tensor[:rows].any()
        assert torch.equal(tensor[rows:], torch.zeros_like(tensor[rows:]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
def test_rows_of_no_sequence(sink: bool, compiled: bool, device: str) -> None:
    """On the reference backend and in the formula; with a sink the LSE of these rows is -inf too,
    and the sink's gradient knows nothing of them."""
    tensors = padded(device, torch.float32)
    ends = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device)
    options: dict[str, Any] = {"causal": True}
    if sink:
        options["sink"] = torch.randn(4, device=device)
    torch._dynamo.reset()
    function: Callable[..., Any] = attention_varlen
    if compiled:
        function = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    actual = results(function, tensors, *ends, *LONGEST, backend="reference", **options)
    formula = results(attention_varlen_reference, tensors, *ends, **options)
    assert_padding_is_empty(actual)
    assert_padding_is_empty(formula)
    for one, other in zip(actual, formula, strict=True):
        assert_close(one, other, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_rows_of_no_sequence_in_kernels(backend: str, compiled: bool) -> None:
    """The same for kernels. The rows of sequences have the results of a call without the other
    rows."""
    tensors = padded("cuda", torch.bfloat16)
    ends = offsets(LENGTHS_Q, "cuda"), offsets(LENGTHS_K, "cuda")
    arguments = (*ends, *LONGEST)
    options = {"causal": True, "backend": backend, "deterministic": True}
    answer = explain(*tensors, *arguments, causal=True)
    if not any(report.serves for report in answer.forward if report.backend == backend):
        pytest.skip(f"{backend} has no kernel for this GPU")
    torch._dynamo.reset()
    function: Callable[..., Any] = attention_varlen
    if compiled:
        function = torch.compile(attention_varlen, fullgraph=True)
    found = results(function, tensors, *arguments, **options)
    assert_padding_is_empty(found)
    sizes = (ROWS, KEYS, KEYS)
    tight = [tensor[:rows] for tensor, rows in zip(tensors, sizes, strict=True)]
    out, lse, *grads = results(attention_varlen, tight, *arguments, **options)
    assert_close(found[1][:, :ROWS], lse, "rounding", name="lse")
    for one, other in zip((found[0], *found[2:]), (out, *grads), strict=True):
        assert_close(one[: other.shape[0]], other, "stored")


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_short_max_seqlen_is_refused(compiled: bool, side: str, device: str) -> None:
    """The reference backend refuses it on every device."""
    tensors = padded(device, torch.float32)
    ends = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device)
    longest = [128, 150] if side == "q" else [129, 149]
    torch._dynamo.reset()
    function: Callable[..., Any] = attention_varlen
    if compiled:
        function = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    least = {"q": 129, "k": 150}[side]
    message = f"max_seqlen_{side} is {least - 1}, expected at least {least} "
    with pytest.raises(ValueError, match=f"attention_varlen: {message}"):
        function(*tensors, *ends, *longest, backend="reference")


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "longest", [(64, 500), (200, 500), (629, 64), (629, 200), (1, 1), (0, 500), (629, 0)], ids=str
)
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_a_short_max_seqlen_leaves_no_row_unwritten(
    backend: str, longest: tuple[int, int], causal: bool, deterministic: bool
) -> None:
    """Each row of each result is right or NaN, whatever was in its memory before. Rows of sequences
    that are no longer than max_seqlen, and rows of no sequence, are right."""
    tensors = padded("cuda", torch.bfloat16, sum(LONG_Q), sum(LONG_K))
    ends = offsets(LONG_Q, "cuda"), offsets(LONG_K, "cuda")
    answer = explain(*tensors, *ends, max(LONG_Q), max(LONG_K))
    if not any(report.serves for report in answer.forward if report.backend == backend):
        pytest.skip(f"{backend} has no kernel for this GPU")
    options = {"backend": backend, "deterministic": deterministic, "causal": causal}
    torch.manual_seed(1)
    grad_out = torch.randn_like(tensors[0])
    grad_lse = torch.randn(4, len(tensors[0]), device="cuda")

    def run(longest: tuple[int, int]) -> dict[str, Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, lse = attention_varlen(*leaves, *ends, *longest, return_lse=True, **options)
        grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
        values = (out.detach(), lse.detach().T, *grads)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), values, strict=True))

    exact = run((max(LONG_Q), max(LONG_K)))
    short = [q <= longest[0] and k <= longest[1] for q, k in zip(LONG_Q, LONG_K, strict=True)]
    for filling in (0.0, 3.0, math.inf):
        # The memory that the allocator hands out next, also for workspaces, is full of this number.
        old = [torch.full((2**22,), filling, device="cuda") for _ in range(8)]
        old += [torch.full_like(t, filling) for t in exact.values() for _ in range(4)]
        del old
        for name, actual in run(longest).items():
            kept = ~actual.isnan().flatten(1).any(1)
            lengths = torch.tensor(LONG_K if name in ("dk", "dv") else LONG_Q)
            must = torch.tensor(short).repeat_interleave(lengths)
            assert kept[: len(must)][must].all() and kept[len(must) :].all(), name
            rule = "rounding" if name == "lse" else "stored"
            assert_close(actual[kept], exact[name][kept], rule, name=name)
