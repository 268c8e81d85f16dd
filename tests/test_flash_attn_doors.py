"""flash-attn 2 by its own names: results, gradients, dropout, private functions, signatures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cute_attention.flash_attn import flash_attn_interface as interface
from cute_attention.integrations import below_autograd
from cute_attention.integrations.flash_attn.dropout import ratio
from cute_attention.semantics.dropout import keep_mask
from flash_attn_plain import CLOSE, cumulative, plain, plain_packed

SLOPES = torch.tensor([[0.5, 0.25, -0.1, 0.02], [0.1, 0.3, 0.0, 1.0]])


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def dense(sq: int = 7, sk: int = 9, dim: int = 24) -> list[Tensor]:
    return tensors((2, sq, 4, dim), (2, sk, 2, dim), (2, sk, 2, dim))


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    """Outputs and, for a random gradient of the first, gradients."""
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)
    grad = torch.randn(mine[0].shape, generator=torch.Generator().manual_seed(9))
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
    found = torch.autograd.grad(mine[0], inputs, grad, retain_graph=True)
    expected = torch.autograd.grad(theirs[0], inputs, grad.double(), retain_graph=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("default", {}, {}),
    ("scale", {"softmax_scale": 0.3}, {"scale": 0.3}),
    ("causal", {"causal": True}, {"causal": True}),
    ("left, causal", {"causal": True, "window_size": (2, 5)}, {"causal": True, "window": (2, 0)}),
    ("left alone", {"window_size": (2, -1)}, {"window": (2, -1)}),
    ("right alone", {"window_size": [-7, 1]}, {"window": (-1, 1)}),
    ("tensor", {"window_size": torch.tensor([3, 1])}, {"window": (3, 1)}),
    ("softcap", {"softcap": 2.0}, {"softcap": 2.0}),
    ("slopes", {"alibi_slopes": SLOPES[0]}, {"slopes": SLOPES[0]}),
    ("batch slopes", {"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_dense(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    q, k, v = dense()
    out, lse, s_dmask = flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert (out.dtype, lse.dtype, s_dmask.numel()) == (torch.float32, torch.float32, 0)
    assert_same((out, lse), plain(q, k, v, **ours), [q, k, v])
    assert torch.equal(flash_attn_func(q, k, v, **theirs), out)


@pytest.mark.parametrize(
    ("theirs", "ours"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_packed(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    cu_q, cu_k = cumulative(5, 3), cumulative(4, 6)
    q, k, v = tensors((8, 4, 16), (10, 2, 16), (10, 2, 16))
    if "slopes" in ours:
        ours = {**ours, "slopes": ours["slopes"].expand(2, 4)}
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 6, return_attn_probs=True, **theirs
    )
    assert lse.shape == (4, 8)
    assert_same((out, lse), plain_packed(q, k, v, cu_q, cu_k, **ours), [q, k, v])


def test_odd_head_dim_and_rows_without_keys() -> None:
    q, k, v = dense(6, 3, 23)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert_same((out, lse), plain(q, k, v, causal=True), [q, k, v])
    assert not out[:, :3].any()
    assert (lse[..., :3] == -torch.inf).all()


def test_gradients_reach_packed_tensors() -> None:
    (qkv,) = tensors((2, 6, 3, 4, 16))
    q, k, v = qkv.unbind(2)
    out, lse, _ = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    assert_same((out, lse), plain(q, k, v, causal=True), [qkv])
    q, kv = tensors((2, 6, 4, 16), (2, 7, 2, 2, 16))
    out, lse, _ = flash_attn_kvpacked_func(q, kv, window_size=(2, 1), return_attn_probs=True)
    assert_same((out, lse), plain(q, kv[:, :, 0], kv[:, :, 1], window=(2, 1)), [q, kv])
    cu = cumulative(4, 2)
    (qkv,) = tensors((6, 3, 4, 16))
    out, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, cu, 4, causal=True, return_attn_probs=True)
    assert_same((out, lse), plain_packed(*qkv.unbind(1), cu, cu, causal=True), [qkv])
    q, kv = tensors((6, 4, 16), (7, 2, 2, 16))
    cu_k = cumulative(3, 4)
    out, lse, _ = flash_attn_varlen_kvpacked_func(q, kv, cu, cu_k, 4, 4, return_attn_probs=True)
    assert_same((out, lse), plain_packed(q, *kv.unbind(1), cu, cu_k), [q, kv])


def kept_of(s_dmask: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    return s_dmask[..., :seqlen_q, :seqlen_k] >= 0


@pytest.mark.parametrize("p", [0.17, 0.25])
def test_dropout_scales_by_exactly_one_over_kept(p: float) -> None:
    q, k, v = dense(20, 33)
    torch.manual_seed(3)
    out, lse, s_dmask = flash_attn_func(q, k, v, p, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 128, 128)
    kept = kept_of(s_dmask, 20, 33)
    expected = plain(q, k, v, causal=True, kept=kept, factor=1 / (1 - p))
    assert_same((out, lse), expected, [q, k, v])
    assert abs((~kept).float().mean() / kept.float().mean() - p) < 0.1
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(q, k, v, p, causal=True), out)
    assert not torch.equal(flash_attn_func(q, k, v, p, causal=True), out)


def test_dropout_of_packed_sequences() -> None:
    cu_q, cu_k = cumulative(5, 3), cumulative(4, 6)
    q, k, v = tensors((8, 4, 16), (10, 2, 16), (10, 2, 16))
    args = (q, k, v, cu_q, cu_k, 5, 6, 0.17)
    out, lse, s_dmask = flash_attn_varlen_func(*args, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 128, 128)
    outs = []
    for b, (nq, nk) in enumerate(((5, 4), (3, 6))):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        kept = kept_of(s_dmask[b : b + 1], nq, nk)
        parts = q[None, rows], k[None, keys], v[None, keys]
        outs.append(plain(*parts, causal=True, kept=kept, factor=1 / 0.83)[0][0])
    assert_same((out,), (torch.cat(outs),), [q, k, v])
    assert lse.shape == (4, 8)


def test_s_dmask_is_relative_to_the_maximum_of_its_row() -> None:
    q, k, v = dense(6, 9)
    options = {"causal": True, "alibi_slopes": SLOPES, "softcap": 3.0}
    _, lse, s_dmask = flash_attn_func(q, k, v, 0.5, return_attn_probs=True, **options)
    width = interface._get_block_size_n(q.device, 24, True, True)
    assert width >= 128  # one block of keys, so one maximum for each row
    # From the probabilities P of the same call: exp(s - max) = P * exp(lse - max).
    grown = torch.eye(9).expand(2, 2, 9, 9).transpose(1, 2)  # v that shows the probabilities
    shown = plain(q, k, grown, causal=True, slopes=SLOPES, softcap=3.0)[0].transpose(1, 2)
    expected = shown / shown.amax(-1, keepdim=True)
    torch.testing.assert_close(s_dmask[..., :6, :9].abs().double(), expected, **CLOSE)
    assert not s_dmask[..., 6:, :].any()
    assert not s_dmask[..., 9:].any()
    assert lse.shape == (2, 4, 6)


def test_dropped_values_are_negative_however_small() -> None:
    q = torch.full((1, 1, 1, 8), 30.0, dtype=torch.float16)
    k = torch.cat((q, -q.expand(1, 40, 1, 8)), 1)
    _, _, s_dmask = flash_attn_func(q, k, k, 0.5, return_attn_probs=True)
    assert 5 < (s_dmask < 0).sum() < 36


def test_private_forward_and_backward_make_a_training_step() -> None:
    q, k, v = dense(20, 33)
    torch.manual_seed(5)
    rest = (None, True, 9, -1, 2.0, SLOPES)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(q, k, v, 0.17, *rest, True)
    assert rng_state.shape == (2,)
    assert not out.requires_grad
    kept = kept_of(s_dmask, 20, 33)
    options: dict[str, Any] = {"causal": True, "window": (9, -1), "softcap": 2.0, "slopes": SLOPES}
    expected = plain(q, k, v, kept=kept, factor=1 / 0.83, **options)[0]
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    seed = keep_mask(rng_state[:1], 0.17, (0, 8), (0, 20), (0, 33)).view_as(kept)
    assert torch.equal(kept | (s_dmask[..., :20, :33] == 0), seed | (s_dmask[..., :20, :33] == 0))
    dout = torch.randn(out.shape)
    grads = [torch.full_like(t, 7.0) for t in (q, k, v)]
    sums = interface._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.17, *rest, False, rng_state
    )
    for found, wanted in zip(
        grads, torch.autograd.grad(expected, [q, k, v], dout.double()), strict=True
    ):
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert sums.shape == (2, 4, 128)
    torch.testing.assert_close(sums[..., :20], (dout * out).sum(-1).transpose(1, 2), **CLOSE)


def test_private_functions_of_packed_sequences() -> None:
    cu_q, cu_k = cumulative(5, 3), cumulative(4, 6)
    q, k, v = tensors((8, 4, 16), (10, 2, 16), (10, 2, 16))
    packing = (cu_q, cu_k, 5, 6)
    out, lse, s_dmask, _ = interface._wrapped_flash_attn_varlen_forward(
        q, k, v, *packing, 0.0, None, True
    )
    assert s_dmask.numel() == 0
    expected, expected_lse = plain_packed(q, k, v, cu_q, cu_k, causal=True)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)
    dout = torch.randn(out.shape)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    interface._wrapped_flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *packing, 0.0, None, True, -1, -1, 0.0, None, False
    )
    for found, wanted in zip(
        grads, torch.autograd.grad(expected, [q, k, v], dout.double()), strict=True
    ):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_some_keys_of_packed_sequences() -> None:
    cu_q, cu_k = cumulative(2, 3), cumulative(6, 5)
    q, k, v = tensors((5, 4, 16), (11, 2, 16), (11, 2, 16))
    used, leftpad = torch.tensor([4, 5], dtype=torch.int32), torch.tensor([1, 2]).int()
    out, lse, *_ = interface._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 3, 6, 0.0, None, True, leftpad_k=leftpad, seqused_k=used
    )
    keys = [slice(1, 4), slice(8, 11)]
    for rows, some in zip((slice(0, 2), slice(2, 5)), keys, strict=True):
        wanted = plain(q[None, rows], k[None, some], v[None, some], causal=True)
        torch.testing.assert_close(out[rows].double(), wanted[0][0], **CLOSE)
        torch.testing.assert_close(lse[:, rows].double(), wanted[1][0], **CLOSE)


def test_ring_attention_over_two_parts_of_the_keys() -> None:
    """Two blocks of keys, merged by their LSEs, as ring attention does."""
    q, k, v = (t.detach().requires_grad_() for t in dense(8, 8))
    rest = (0.0, 24**-0.5, False, -1, -1, 0.0, None)
    halves = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    parts = [interface._flash_attn_forward(q, *half, *rest, False)[:2] for half in halves]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    weights = [(part[1] - lse).exp().transpose(1, 2)[..., None] for part in parts]
    out = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
    expected = plain(q, k, v)[0]
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    dout = torch.randn(out.shape)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for index, (k_half, v_half) in enumerate(halves):
        rows = slice(4 * index, 4 * index + 4)
        part = torch.empty_like(q)
        grads = part, dk[:, rows], dv[:, rows]
        interface._flash_attn_backward(dout, q, k_half, v_half, out, lse, *grads, *rest, False)
        dq += part
    wanted = torch.autograd.grad(expected, [q, k, v], dout.double())
    for found, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("torch_asks", [False, True])
def test_a_private_backward_is_deterministic_where_torch_asks(
    asked: bool, torch_asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (t.detach() for t in dense())
    rest = (0.0, 24**-0.5, True, -1, -1, 0.0, None)
    out, lse, *_ = interface._flash_attn_forward(q, k, v, *rest, False)
    seen = []
    backward_of = below_autograd.backward_of

    def watched(plan: Any) -> Any:
        op, choices = backward_of(plan)

        def run(*given: Any) -> Any:
            seen.append(given[4])
            return op(*given)

        return run, choices

    monkeypatch.setattr(below_autograd, "backward_of", watched)
    torch.use_deterministic_algorithms(torch_asks)
    try:
        grads = [torch.empty_like(t) for t in (q, k, v)]
        interface._flash_attn_backward(
            torch.ones_like(out), q, k, v, out, lse, *grads, *rest, asked
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [asked or torch_asks]


def test_pages_of_packed_sequences() -> None:
    cu_q, cu_k = cumulative(2, 3), cumulative(6, 5)
    q, k, v = tensors((5, 4, 16), (11, 2, 16), (11, 2, 16))
    table = torch.tensor([[4, 1, -7], [0, 3, 9]], dtype=torch.int32)  # the third is not needed
    k_pages, v_pages = torch.full((6, 4, 2, 16), torch.nan), torch.full((6, 4, 2, 16), torch.nan)
    for pages, rows in ((k_pages, k.detach()), (v_pages, v.detach())):
        pages[4], pages[1, :2] = rows[:4], rows[4:6]
        pages[0], pages[3, :1] = rows[6:10], rows[10:]
    args = (q, k_pages, v_pages, cu_q, cu_k, 3, 6)
    out = flash_attn_varlen_func(*args, causal=True, block_table=table)
    expected = plain_packed(q, k, v, cu_q, cu_k, causal=True)[0]
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: there is no gradient"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match=r"block_table has shape \[2, 1\]"):
        flash_attn_varlen_func(*args, block_table=table[:, :1])


def test_lengths_may_be_tensors() -> None:
    q, k, v = tensors((8, 4, 16), (8, 2, 16), (8, 2, 16))
    cu = cumulative(5, 3)
    longest = cu.diff().max()
    out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu, cu, 5, 5))


def test_compiles_whole() -> None:
    q, k, v = dense()

    def two_calls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        once = flash_attn_func(q, k, v, causal=True, window_size=(3, -1))
        return once + flash_attn_func(q, k, v, 0.25, 0.3)

    compiled = torch.compile(two_calls, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = two_calls(q, k, v)
    torch.manual_seed(1)
    assert_same((compiled(q, k, v),), (expected.double(),), [q, k, v])


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda q, k, v: flash_attn_func(q, k, v, 0.0, "x"), TypeError, "softmax_scale is a str"),
    (lambda q, k, v: flash_attn_func(q, k, v, window_size=3), TypeError, "window_size is 3"),
    (lambda q, k, v: flash_attn_func(q, k, v, window_size=(1.5, 2)), TypeError, "window_size's"),
    (lambda q, k, v: flash_attn_func(q, k[:1], v), ValueError, r"k has shape \[1, 9, 2, 24\]"),
    (lambda q, k, v: flash_attn_func(q, k, v, 1.0), ValueError, "dropout_p is 1.0"),
    (lambda q, k, v: flash_attn_func(q, k, v, "a"), TypeError, "dropout_p is a str"),
    (lambda q, k, v: flash_attn_func([], k, v), TypeError, "q is a list"),
    (lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=SLOPES[0].double()), TypeError,
     "alibi_slopes has dtype torch.float64"),
    (lambda q, k, v: flash_attn_qkvpacked_func(q), ValueError, r"qkv has shape \[2, 7, 4, 24\]"),
    (lambda q, k, v: flash_attn_kvpacked_func(q, 1), TypeError, "kv is an int"),
    (lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], cumulative(7).long(), cumulative(9),
     7, 9), TypeError, "cu_seqlens_q has dtype torch.int64"),
    (lambda q, k, v: flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 2, 8), cumulative(7), -1),
     ValueError, "max_seqlen is -1"),
    (lambda q, k, v: flash_attn_func(q, k, v, causal="no"), TypeError, "causal is a str"),
    (lambda q, k, v: flash_attn_func(q, k, v, causal=q), TypeError, "causal is a torch.Tensor"),
    (lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack((k, v), 2), deterministic="no"),
     TypeError, "deterministic is a str"),
    (lambda q, k, v: interface._flash_attn_forward(q, k, v, 0.0, 1.0, False, "x", -1, 0.0, None,
     False), TypeError, "window_size_left is 'x'"),
    (lambda q, k, v: interface._flash_attn_forward(q, k, v, 0.0, 1.0, False, -1, 1.5, 0.0, None,
     False), TypeError, "window_size_right is 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=[case[2] for case in WRONG])
def test_errors_use_the_names_of_the_function(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=rf"^_?flash_attn_\w+: {words}"):
        call(*dense())


def test_ratio_of_the_two_factors() -> None:
    assert ratio(0.25) == 1.0  # 64 of 256
    assert ratio(0.17) == pytest.approx(212 / 256 / 0.83)
    assert ratio(0.001) == pytest.approx(1 / 0.999)  # rounded to none


def test_a_scale_of_0_makes_all_scores_equal() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 16).unbind()
    softmax = flash_attn_func(q, k, v, dropout_p=0.5, softmax_scale=0.0, return_attn_probs=True)[2]
    assert torch.equal(softmax[:, :, :5, :5].abs(), torch.ones(1, 2, 5, 5))
