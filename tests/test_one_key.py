"""Where there is one key its probability is 1, so the gradient of the output with respect to q and
k is 0: not almost, as a kernel that subtracts two sums would leave it, but exactly."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_reference, attention_varlen, autograd

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 3},
    "window_that_hides_it": {"window": (0, 0)},
}


def inputs(device: str, rows: tuple[int, ...], keys: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (*rows, 6, 64), (*keys, 2, 64), (*keys, 2, 64)
    return [
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_dense(options: dict[str, Any], device: str) -> None:
    q, k, v = inputs(device, (3, 239), (3, 1))
    out = attention(q, k, v, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


def test_packed(device: str) -> None:
    """No key or one, and as many queries as there are."""
    q, k, v = inputs(device, (9,), (2,))
    cu_q, cu_k = (
        torch.tensor(ends, dtype=torch.int32, device=device)
        for ends in ([0, 4, 7, 9], [0, 1, 1, 2])
    )
    out = attention_varlen(q, k, v, cu_q, cu_k, 4, 1)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not dq.any()
    assert not dk.any()
    # Each head of k belongs to three of q.
    expected = torch.tensor([12.0, 6.0], device=device)[:, None, None].expand(2, 2, 64)
    assert torch.equal(dv.float(), expected)


def test_what_depends_on_the_scores_has_a_gradient(device: str) -> None:
    """The LSE, and an output beside a sink."""
    q, k, v = inputs(device, (2, 5), (2, 1))
    sink = torch.zeros(6, device=device)
    for options in ({"return_lse": True}, {"sink": sink}):
        result = attention(q, k, v, **options)
        result = result[1] if isinstance(result, tuple) else result
        mine = torch.autograd.grad(result, (q, k), torch.ones_like(result))
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        theirs = attention_reference(*wide, **options)
        theirs = theirs[1] if isinstance(theirs, tuple) else theirs
        wanted = torch.autograd.grad(theirs, wide[:2], torch.ones_like(theirs))
        for found, want in zip(mine, wanted, strict=True):
            assert found.any()
            torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2)


def test_nan_stays(device: str) -> None:
    q, k, v = inputs(device, (1, 3), (1, 1))
    with torch.no_grad():
        q[0, 1, 0, 0] = torch.nan
    out = attention(q, k, v)
    dq, _, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dq[0, 1, 0].isnan().all()
    assert not dq[0, 2].any()
    assert not dq[0, :, 1:].any()


@pytest.mark.parametrize("ends", [[0, 1, 1, 2], [0, 1, 3, 4], [0, 2]], ids=str)
def test_a_sequence_longer_than_was_said(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the longest length is said to be 1 and is not, the gradients of a kernel, which are
    right or NaN, are not replaced by zeros."""
    grads = [torch.full((ends[-1], 2, 8), value) for value in (2.0, 3.0, 4.0)]
    plan = types.SimpleNamespace(
        forward=lambda q, k, v, *extras: (q.clone(), q[..., 0].T.contiguous()),
        options=(),
        return_lse=False,
        deterministic=False,
    )
    monkeypatch.setattr(autograd, "backward_of", lambda plan: (lambda *arguments: grads, ()))
    q, k, v = (torch.ones(ends[-1], 2, 8, requires_grad=True) for _ in range(3))
    cu = torch.tensor(ends, dtype=torch.int32)
    out = autograd.AttentionFunction.apply(plan, q, k, v, cu, cu, 1, 1)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    kept = max(cu.diff().tolist()) > 1
    for mine, theirs, scale in zip(found, grads, (kept, kept, True), strict=True):
        assert torch.equal(mine, theirs * scale)
