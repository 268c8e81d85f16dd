"""FlashAttention-3 by its own names: results and gradients, chunks, qv, unused rows, combine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    get_scheduler_metadata,
)
from flash_attn_plain import CLOSE, cumulative, plain, plain_packed


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)
    grad = torch.randn(mine[0].shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(mine[0], inputs, grad)
    expected = torch.autograd.grad(theirs[0], inputs, grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("dims", [(24, 16), (16, 64), (8, 64)])
@pytest.mark.parametrize("with_qv", [False, True])
def test_head_dims_and_qv(dims: tuple[int, int], with_qv: bool) -> None:
    dim, dim_v = dims
    q, k, v, qv = tensors((2, 5, 4, dim), (2, 7, 2, dim), (2, 7, 2, dim_v), (2, 5, 4, dim_v))
    inputs = [q, k, v, qv] if with_qv else [q, k, v]
    given = {"qv": qv} if with_qv else {}
    options: dict[str, Any] = {"causal": True, "softcap": 5.0}
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **given, **options)
    assert_same((out, lse), plain(q, k, v, **given, **options), inputs)
    hints: dict[str, Any] = {"num_splits": 3, "pack_gqa": True, "sm_margin": 4}
    assert torch.equal(flash_attn_func(q, k, v, **given, **options, **hints), out)


CHUNKS = [1, 2, 3, 5, 7, 8, 100, 2**40]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 11), (11, 4), (1, 6), (6, 1)])
def test_chunks(chunk: int, lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    q, k, v = tensors((2, seqlen_q, 2, 8), (2, seqlen_k, 1, 8), (2, seqlen_k, 1, 8))
    for options in ({}, {"causal": True}, {"window": (2, 1)}):
        given = {"window_size" if name == "window" else name: x for name, x in options.items()}
        out, lse = flash_attn_func(
            q, k, v, attention_chunk=chunk, return_attn_probs=True, **given
        )  # fmt: skip
        assert_same((out, lse), plain(q, k, v, chunk=chunk, **options), [q, k, v])


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 50])
@pytest.mark.parametrize("used", ["all", "queries", "keys", "both"])
def test_packed_with_unused_rows_and_chunks(chunk: int, used: str) -> None:
    cu_q, cu_k = cumulative(5, 0, 3), cumulative(4, 2, 7)
    seqused_q = torch.tensor([3, 0, 3]).int() if used in ("queries", "both") else None
    seqused_k = torch.tensor([4, 1, 5]).int() if used in ("keys", "both") else None
    q, k, v, qv = tensors((8, 2, 8), (13, 1, 8), (13, 1, 12), (8, 2, 12))
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 7, seqused_q, seqused_k, causal=True, qv=qv,
        attention_chunk=chunk, return_attn_probs=True,
    )  # fmt: skip
    rows_q = rows_of(cu_q, seqused_q)
    rows_k = rows_of(cu_k, seqused_k)
    less_q = cu_q if seqused_q is None else cumulative(*seqused_q.tolist())
    less_k = cu_k if seqused_k is None else cumulative(*seqused_k.tolist())
    some, some_lse = plain_packed(
        q[rows_q], k[rows_k], v[rows_k], less_q, less_k, causal=True, chunk=chunk, qv=qv[rows_q]
    )
    expected = torch.zeros(8, 2, 12, dtype=torch.float64).index_copy(0, rows_q, some)
    expected_lse = torch.full((2, 8), -torch.inf, dtype=torch.float64)
    expected_lse = expected_lse.index_copy(1, rows_q, some_lse)
    assert_same((out, lse), (expected, expected_lse), [q, k, v, qv])


def rows_of(cu_seqlens: Tensor, used: Tensor | None) -> Tensor:
    lengths = cu_seqlens.diff() if used is None else used
    parts = zip(cu_seqlens.tolist(), lengths.tolist(), strict=False)
    return torch.cat([torch.arange(start, start + many) for start, many in parts])


def test_packed_qkv_of_both_forms() -> None:
    (qkv,) = tensors((2, 5, 8, 16))  # 4 query heads, 2 of keys, 2 of values
    q, k, v = qkv.split([4, 2, 2], 2)
    out = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert_same((out,), plain(q, k, v, causal=True)[:1], [qkv])
    (qkv,) = tensors((2, 5, 3, 2, 16))
    out, lse = flash_attn_qkvpacked_func(qkv, attention_chunk=2, return_attn_probs=True)
    assert_same((out, lse), plain(*qkv.unbind(2), chunk=2), [qkv])
    with pytest.raises(ValueError, match="qkvpacked_func: qkv has shape"):
        flash_attn_qkvpacked_func(qkv[:, :, 0])


def test_parts_are_combined() -> None:
    q, k, v = tensors((2, 3, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    parts = [
        flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True)
        for s in (slice(0, 4), slice(4, 9))
    ]
    outs = torch.stack([out for out, _ in parts] + [torch.full_like(q, torch.nan)])
    lses = torch.stack(
        [lse.transpose(1, 2) for _, lse in parts] + [torch.full((2, 3, 2), -torch.inf)]
    )
    expected, expected_lse = plain(q, k, v)
    out, lse = flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse.transpose(1, 2), **CLOSE)
    assert flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    given = torch.empty(2, 3, 2, 8)
    assert flash_attn_combine(outs[:, 0], lses[:, 0], given[0])[0].data_ptr() == given.data_ptr()
    torch.testing.assert_close(given[0].double(), expected[0], **CLOSE)
    nothing, lse = flash_attn_combine(outs, torch.full_like(lses, -torch.inf))
    assert not nothing.any()
    assert (lse == -torch.inf).all()
    with pytest.raises(ValueError, match="flash_attn_combine: lse_partial has shape"):
        flash_attn_combine(outs, lses.transpose(2, 3))


def test_private_functions() -> None:
    q, k, v = tensors((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    out, lse, *rest = _flash_attn_forward(q, k, v, causal=True, window_size_left=3)
    assert [part.numel() for part in rest] == [0, 0]
    expected, expected_lse = plain(q, k, v, causal=True, window=(3, 0))
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    dout = torch.randn(out.shape)
    dq, dk, dv = grads
    _flash_attn_backward(
        dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=True, window_size_left=3
    )
    wanted = torch.autograd.grad(expected, [q, k, v], dout.double())
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want, **CLOSE)
    cu_q, cu_k = cumulative(5, 5), cumulative(7, 7)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    packed, *_ = _flash_attn_forward(
        *rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7, causal=True,
        window_size_left=3, attention_chunk=100,
    )  # fmt: skip
    torch.testing.assert_close(packed.view_as(out), out, **CLOSE)


def test_private_backward_with_unused_rows() -> None:
    """NaN in rows that nobody uses; gradients there are 0."""
    cu_q, cu_k = cumulative(5, 0, 3), cumulative(4, 2, 7)
    used_q, used_k = torch.tensor([3, 0, 3]).int(), torch.tensor([4, 1, 5]).int()
    q, k, v = (t.detach() for t in tensors((8, 2, 8), (13, 1, 8), (13, 1, 8)))
    dout = torch.randn(8, 2, 8)
    rows_q, rows_k = rows_of(cu_q, used_q), rows_of(cu_k, used_k)
    some = [q[rows_q].clone(), k[rows_k].clone(), v[rows_k].clone()]
    for part in some:
        part.requires_grad_()
    less = cumulative(*used_q.tolist()), cumulative(*used_k.tolist())
    expected = torch.autograd.grad(plain_packed(*some, *less, causal=True)[0], some, dout[rows_q])
    for tensor, rows in ((q, rows_q), (k, rows_k), (v, rows_k), (dout, rows_q)):
        unused = torch.ones(tensor.shape[0], dtype=torch.bool)
        unused[rows] = False
        tensor[unused] = torch.nan
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    out, lse, *_ = _flash_attn_forward(
        q, k, v, seqused_q=used_q, seqused_k=used_k, causal=True, **given
    )
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    dq, dk, dv = grads
    _flash_attn_backward(
        dout, q, k, v, out, lse, sequed_q=used_q, sequed_k=used_k, dq=dq, dk=dk, dv=dv,
        is_causal=True, **given,
    )  # fmt: skip
    for grad, rows, want in zip(grads, (rows_q, rows_k, rows_k), expected, strict=True):
        whole = torch.zeros_like(grad).index_copy(0, rows, want)
        torch.testing.assert_close(grad, whole, **CLOSE)
    with pytest.raises(ValueError, match="_flash_attn_backward: sequed_q or sequed_k is given"):
        _flash_attn_backward(dout, q, k, v, out, lse, sequed_q=used_q)


def test_other_errors() -> None:
    q, k, v = tensors((1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8))
    with pytest.raises(ValueError, match="flash_attn_func: attention_chunk is -1"):
        flash_attn_func(q, k, v, attention_chunk=-1)
    with pytest.raises(ValueError, match=r"flash_attn_func: qv has shape \[1, 2, 2, 4\]"):
        flash_attn_func(q, k, v, qv=q[..., :4])
    with pytest.raises(TypeError, match="flash_attn_func: softmax_scale is a str"):
        flash_attn_func(q, k, v, "a")
    with pytest.raises(TypeError, match=r"flash_attn_func: qv has dtype torch\.float16"):
        flash_attn_func(q, k, v, qv=q.half())
    with pytest.raises(TypeError, match="_flash_attn_backward: is_causal is a str"):
        _flash_attn_backward(q, q, k, v, q, q, is_causal="no")
    with pytest.raises(TypeError, match="_flash_attn_forward: window_size_left is None"):
        _flash_attn_forward(q, k, v, window_size_left=None)
    lse = q[..., 0]
    with pytest.raises(TypeError, match=r"flash_attn_combine: out_partial has dtype torch\.int64"):
        flash_attn_combine(q.long(), lse)
    with pytest.raises(TypeError, match="flash_attn_combine: out_dtype is 'half'"):
        flash_attn_combine(q, lse, out_dtype="half")
    with pytest.raises(TypeError, match="flash_attn_combine: out is a list"):
        flash_attn_combine(q, lse, [])


def test_the_schedule_is_a_hint() -> None:
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    hint = get_scheduler_metadata(2, 1, 8, 4, 2, 64, lengths, causal=True)
    assert (hint.dtype, hint.numel()) == (torch.int32, 0)
