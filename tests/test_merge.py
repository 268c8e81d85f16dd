"""merge_attention: one result from those of parts of the keys, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.inference import merge_attention
from tolerances import assert_close, assert_same_bits


def parts_of(count: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(count)
    outs = [torch.randn(2, 3, 4, 5, dtype=dtype) for _ in range(count)]
    lses = [3 * torch.randn(2, 4, 3, dtype=dtype) for _ in range(count)]
    return outs, lses


def hide(outs: list[Tensor], lses: list[Tensor]) -> None:
    """Rows that some parts do not see, with NaN in their outputs, and one that none sees."""
    for part in range(len(outs)):
        lses[part][0, 1, 2] = -torch.inf
        outs[part][0, 2, 1] = torch.nan
    lses[0][1, 3, 0] = -torch.inf
    outs[0][1, 0, 3] = torch.nan


@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_of_outs_and_lses(count: int) -> None:
    outs, lses = parts_of(count)
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    function: Callable[..., Any] = lambda *ts: merge_attention(ts[:count], ts[count:])  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_that_parts_do_not_see(count: int) -> None:
    """Their outputs are not read, and get no gradient; what the other parts get is right."""
    outs, lses = parts_of(count)
    hide(outs, lses)
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = merge_attention(outs, lses)
    assert (lse[0, 1, 2], out[0, 2, 1].abs().sum()) == (-torch.inf, 0)
    if count > 1:  # without the first part, the row is that of the others
        rest = merge_attention([o[1:, :1, 3:] for o in outs[1:]], [x[1:, 3:, :1] for x in lses[1:]])
        assert_close(out[1:, :1, 3:], rest[0], "rounding")
        assert_close(lse[1:, 3:, :1], rest[1], "rounding")
    finite = lse.isfinite()
    assert out.isfinite().all()
    total = out.square().sum() + torch.where(finite, lse, 0.0).sin().sum()
    grads = torch.autograd.grad(total, leaves)
    assert all(grad.isfinite().all() for grad in grads)
    for part in range(count):
        assert not grads[part][0, 2, 1].any()
        assert grads[count + part][0, 1, 2] == 0
    assert not grads[0][1, 0, 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_parts_make_the_whole(dtype: torch.dtype, parts: int) -> None:
    """Keys in parts of different lengths, one of them empty, and the gradient through them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((6, 4), (40, 2), (40, 2)))
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    borders = [0, *torch.randint(41, (parts - 1,)).sort().values.tolist(), 40]
    if parts > 2:
        borders[2] = borders[1]
    pieces = [
        attention(leaves[0], leaves[1][:, a:b], leaves[2][:, a:b], return_lse=True)
        for a, b in zip(borders, borders[1:], strict=False)  # noqa: RUF007
    ]
    out, lse = merge_attention([o for o, _ in pieces], [x for _, x in pieces])
    wanted, wanted_lse = attention(*exact, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    rule = "gradient" if dtype == torch.float32 else "rounding"
    assert_close(out.double(), wanted, rule, dtype=dtype)
    assert_close(lse.double(), wanted_lse, "gradient", dtype=torch.float32, name="lse")
    grad = torch.randn(out.shape)
    found = torch.autograd.grad([out, lse], leaves, [grad.to(dtype), torch.ones_like(lse)])
    right = torch.autograd.grad(
        [wanted, wanted_lse], exact, [grad.to(dtype).double(), torch.ones_like(wanted_lse)]
    )
    for one, other in zip(found, right, strict=True):
        assert_close(one.double(), other, "gradient", dtype=dtype)


def test_packed_stacked_and_compiled() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = torch.randn(3, 5, 2, 8).unbind()
    parts = [attention_varlen(q, k, v, ends, ends, 3, 3, return_lse=True) for _ in range(2)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = merge_attention(outs, lses)
    assert_close(out, parts[0][0], "rounding")
    assert_close(lse, parts[0][1] + torch.tensor(2.0).log(), "rounding", name="lse")
    compiled = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(outs, lses), (out, lse), strict=True):
        assert_same_bits(one, other, "compiled")


def test_huge_and_small_lses() -> None:
    """No part overflows another: the differences of the LSEs alone count."""
    outs, _ = parts_of(2, torch.float32)
    low, high = torch.full((2, 4, 3), -3e4), torch.full((2, 4, 3), 3e4)
    out, lse = merge_attention(outs, [low, high])
    assert_same_bits(out, outs[1], "out")
    assert_same_bits(lse, high, "lse")
    out, lse = merge_attention(outs, [low, low])
    assert_close(out, (outs[0] + outs[1]) / 2, "rounding")
    assert_close(lse, low + torch.tensor(2.0).log(), "rounding")


ONE, LSE = torch.ones(2, 3, 4, 5), torch.ones(2, 4, 3)
WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ([], [], ValueError, "outs has 0 parts and lses has 0"),
    (None, [LSE], TypeError, "outs is None, expected a list of tensors, or one tensor"),
    ([ONE], 5, TypeError, "lses is an int, expected a list of tensors, or one tensor"),
    (ONE[0, 0, 0, 0], [LSE], TypeError, "outs is a torch.Tensor without dimensions, expected"),
    ([ONE], [LSE, LSE], ValueError, "outs has 1 parts and lses has 2"),
    ([ONE, 1], [LSE, LSE], TypeError, r"outs\[1\] is an int, expected a torch.Tensor"),
    ([ONE, ONE.double()], [LSE, LSE], TypeError, r"outs\[1\] has dtype torch.float64"),
    ([ONE], [LSE.int()], TypeError, r"lses\[0\] has dtype torch.int32"),
    ([ONE, ONE[:1]], [LSE, LSE], ValueError, r"outs\[1\] has shape \[1, 3, 4, 5\], expected"),
    ([ONE], [LSE.transpose(1, 2)], ValueError, r"lses\[0\] has shape \[2, 3, 4\], expected"),
    ([LSE[0]], [LSE[0]], ValueError, r"outs\[0\] has shape \[4, 3\], expected \[batch, seqlen_q"),
    ([ONE], [LSE.to("meta")], ValueError, r"lses\[0\] is on meta, expected cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("outs", "lses", "error", "words"), WRONG, ids=[w[3] for w in WRONG])
def test_errors(outs: Any, lses: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^merge_attention: {words}"):
        merge_attention(outs, lses)
