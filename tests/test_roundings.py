"""What `bench.roundings` explains and what it does not: errors that kernels have, each made here by
the rounding that makes it, and others that are larger."""

from __future__ import annotations

import pytest
import torch

from cute_attention import attention_reference
from cute_attention.bench.roundings import exact
from cute_attention.semantics.dropout import keep_scale
from random_checks import Wrong, judge


def test_errors_of_copies_of_a_head_add_up() -> None:
    """Those of other heads do not: the size of a sum grows less."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, 1, 16).bfloat16() for n in (9, 7, 7, 9))
    one = exact(q, k, v, grad).sizes
    copies = exact(q.expand(-1, -1, 8, -1), k, v, grad.expand(-1, -1, 8, -1)).sizes
    others = exact(torch.randn(1, 9, 8, 16).bfloat16(), k, v, grad.repeat(1, 1, 8, 1)).sizes
    for name in ("dk", "dv"):
        torch.testing.assert_close(copies[name], 8 * one[name])
        assert others[name].mean() < 0.7 * copies[name].mean()


def test_errors_of_copies_of_a_query_add_up() -> None:
    """64 equal queries of two heads whose gradients cancel, as they nearly do in some columns of a
    sum over heads: what is left of dK and dV is the rounding of P and dS, 64 times the same."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, 40, 1, 16).bfloat16() for _ in range(2))
    q, grad = (torch.randn(1, 1, 2, 16).expand(1, 64, 2, 16).bfloat16() for _ in range(2))
    q[:, :, 1] = q[:, :, 0] + 0.01 * torch.randn(16).bfloat16()
    grad[:, :, 1] = -grad[:, :, 0]
    right = exact(q, k, v, grad)
    wide_q, wide_k, wide_v, wide_grad = (t.double().transpose(1, 2) for t in (q, k, v, grad))
    p = (wide_q @ wide_k.mT / 4).softmax(-1)
    out = (p.bfloat16().double() @ wide_v).bfloat16().double()
    delta = (wide_grad * out).sum(-1, keepdim=True)
    ds = (p * (wide_grad @ wide_v.mT - delta)).bfloat16().double()
    found = {"dv": p.bfloat16().double().mT @ wide_grad, "dk": ds.mT @ wide_q / 4}
    for name, value in found.items():
        sums = value.sum(1)[:, :, None].bfloat16()
        judge(name, sums, right.values[name], right.sizes[name], right.eps[name])
        with pytest.raises(Wrong, match=name):  # without that a query comes more than once
            judge(name, sums, right.values[name], right.sizes[name] / 8, right.eps[name])


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_queries_with_one_output_and_one_gradient_share_the_error_of_delta(heads_kv: int) -> None:
    """Where all keys are alike, so are the outputs of queries that differ: the rounding of the
    output alone, which the backward reads, makes the error of dK."""
    torch.manual_seed(1)
    heads = 2 * heads_kv
    q = (torch.randn(1, 400, heads, 16) + 1.5).bfloat16()
    k = torch.randn(1, 1, heads_kv, 16).expand(1, 52, heads_kv, 16).bfloat16()
    v = torch.randn(1, 52, heads_kv, 16).bfloat16()
    grad = torch.randn(1, 1, 1, 16).expand(1, 400, heads, 16).bfloat16()
    right = exact(q, k, v, grad)
    wide_q, wide_grad = (t.double().transpose(1, 2) for t in (q, grad))
    wide_v = v.double().transpose(1, 2).repeat_interleave(2, 1)
    out = wide_v.mean(-2, keepdim=True).bfloat16().double()
    ds = (wide_grad @ wide_v.mT - (wide_grad * out).sum(-1, keepdim=True)) / 52
    dk = (ds.mT @ wide_q / 4).unflatten(1, (heads_kv, 2)).sum(2).transpose(1, 2)
    args = right.values["dk"], right.sizes["dk"], right.eps["dk"]
    judge("dk", dk, *args)
    with pytest.raises(Wrong, match="dk"):  # if the queries' errors were taken for independent
        judge("dk", dk, args[0], args[1] / (2 * 400) ** 0.5, args[2])
    others = exact(q, k + 0.1 * torch.randn(k.shape).bfloat16(), v, grad)  # not one output
    added, added_by_others = (
        (each.sizes["dk"] - each.values["dk"].abs()).mean() for each in (right, others)
    )
    assert added_by_others < added / 10


def test_copies_of_a_key_share_the_error_of_the_derivative_of_softcap() -> None:
    """Where the cap is reached, 1 - tanh^2 is a few ulps of 1 or 0: of the LSE's gradient, which
    all keys share, nothing may be left. A gradient of ten times as much may not be missing."""
    q, k, v, grad = (torch.ones(1, n, 1, 16).bfloat16() for n in (4, 200, 200, 4))
    zero, grad_lse = 0 * grad, torch.ones(1, 1, 4)
    for scale, is_noticed in ((0.5, False), (0.3, True)):  # tanh of 8 and of 4.8
        right = exact(q, k, v, zero, softcap=1.0, scale=scale, grad_lse=grad_lse)
        args = (0 * q, right.values["dq"], right.sizes["dq"], right.eps["dq"])
        if not is_noticed:
            judge("dq", *args)
            continue
        with pytest.raises(Wrong, match="dq"):
            judge("dq", *args)


def test_errors_of_copies_of_a_key_add_up() -> None:
    """Where dS is so small that fp16 has few numbers there, all copies are rounded alike."""
    torch.manual_seed(0)
    q, v, grad = (torch.randn(1, n, 1, 16).half() for n in (4, 200, 4))
    k = torch.randn(1, 1, 1, 16).expand(1, 200, 1, 16).half()
    grad_lse = torch.full((1, 1, 4), 1.7e-5)
    right = exact(q, k, v, 0 * grad, grad_lse=grad_lse)
    ds = (grad_lse / 200)[..., None].expand(1, 1, 4, 200).half().double()
    dq = (ds @ k.double().transpose(1, 2) / 4).transpose(1, 2).half()
    args = right.values["dq"], right.sizes["dq"], right.eps["dq"]
    judge("dq", dq, *args)
    with pytest.raises(Wrong, match="dq"):
        judge("dq", dq + dq.abs().max(), *args)
    others = torch.randn(k.shape).half()
    assert exact(q, others, v, 0 * grad, grad_lse=grad_lse).sizes["dq"].max() < args[1].max() / 5


def test_what_rounding_may_carry_beyond_the_largest_number_may_be_infinite() -> None:
    found, expected = torch.tensor([torch.inf]).half(), torch.tensor([60000.0]).double()
    eps = torch.finfo(torch.float16).eps
    judge("dk", found, expected, torch.tensor([2e6]).double(), eps)
    for sign, size in ((1, 1e6), (-1, 2e6)):
        with pytest.raises(Wrong, match="dk"):
            judge("dk", sign * found, expected, torch.tensor([size]).double(), eps)


@pytest.mark.parametrize("softcap", [30.0, 1e4])
def test_softcap_may_be_as_far_off_as_its_polynomial(softcap: float) -> None:
    """In the LSE, which may be near 0 where scores are not, and in probabilities. Three times as
    far is noticed."""
    torch.manual_seed(0)
    q, k = (torch.rand(1, n, 1, 64).bfloat16() for n in (4, 200))
    v, grad = (torch.randn(1, n, 1, 64).bfloat16() for n in (200, 4))
    k = -2.5 * k
    right = exact(q, k, v, grad, softcap=softcap)
    wide_q, wide_k, wide_grad = (t.double().transpose(1, 2) for t in (q, k, grad))
    capped = softcap * torch.tanh(wide_q @ wide_k.mT / 8 / softcap)
    for factor, is_noticed in ((1, False), (3, True)):
        lse = (capped * (1 + factor * 6.3e-6)).logsumexp(-1)
        args = lse.float(), right.values["lse"], right.sizes["lse"], right.eps["lse"]
        if is_noticed:
            with pytest.raises(Wrong, match="lse"):
                judge("lse", *args)
            continue
        judge("lse", *args)
        p = (capped * (1 + 6.3e-6) - right.values["lse"][..., None]).exp()
        dv = (p.mT @ wide_grad).transpose(1, 2).bfloat16()
        judge("dv", dv, right.values["dv"], right.sizes["dv"], right.eps["dv"])


def test_a_probability_that_is_flushed_may_be_missing_in_a_gradient() -> None:
    """And one that is not may not."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 4, 1, 8).bfloat16() for _ in range(4))
    bias = torch.tensor([0.0, 0.0, -20.0, -95.0]).expand(1, 1, 4, 4)  # exp(-95) is below 2^-126
    right = exact(0 * q, k, v, grad, bias=bias)
    expected, size = right.values["dbias"], right.sizes["dbias"]
    wrong = expected.clone().float()
    wrong[..., 3] = 0
    judge("dbias", wrong, expected, size, right.eps["dbias"])
    wrong[..., 2] = 0
    with pytest.raises(Wrong, match="dbias"):
        judge("dbias", wrong, expected, size, right.eps["dbias"])


def test_small_numbers_of_a_row_may_all_be_rounded_one_way() -> None:
    """A dS of less than half of fp16's smallest number is 0, for keys that differ as well. The same
    dQ may not be missing where dS is 2000 times as large."""
    torch.manual_seed(0)
    q, v, grad = (torch.randn(1, n, 1, 16).half() for n in (4, 1000, 4))
    k = (torch.randn(1, 1000, 1, 16) + 20).half()
    for size, is_noticed in ((2.5e-5, False), (5e-2, True)):
        grad_lse = torch.full((1, 1, 4), size)
        right = exact(0 * q, k, v, 0 * grad, grad_lse=grad_lse)
        args = 0 * q, right.values["dq"], right.sizes["dq"], right.eps["dq"]
        if is_noticed:
            with pytest.raises(Wrong, match="dq"):
                judge("dq", *args)
        else:
            assert not (grad_lse / 1000).half().any()
            judge("dq", *args)


def test_what_dropout_multiplies_by_is_not_in_the_numbers_that_are_rounded() -> None:
    """Kernels round dS / keep_scale(), which leaves the normal numbers of fp16 earlier."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, 1, 16).half() for n in (40, 60, 60, 40))
    grad_lse = 2e-5 * torch.randn(1, 1, 40)
    options = {"dropout_p": 0.9, "dropout_seed": 3}
    right = exact(q, k, v, 0 * grad, grad_lse=grad_lse, **options)
    wide_q, wide_k = (t.double().transpose(1, 2) for t in (q, k))
    ds = (wide_q @ wide_k.mT / 4).softmax(-1) * grad_lse[..., None]
    unit = keep_scale(0.9)
    found = unit * (ds / unit).half().double() @ wide_k / 4
    dq = found.transpose(1, 2).half()
    args = right.values["dq"], right.sizes["dq"], right.eps["dq"]
    judge("dq", dq, *args)
    without = exact(q, k, v, 0 * grad, grad_lse=grad_lse)
    with pytest.raises(Wrong, match="dq"):
        judge("dq", dq, without.values["dq"], without.sizes["dq"], without.eps["dq"])
    # Where nothing is kept, the gradient of the LSE is rounded as without dropout.
    none = exact(q, k, v, 0 * grad, grad_lse=grad_lse, dropout_p=1.0, dropout_seed=3)
    torch.testing.assert_close(none.sizes["dq"], without.sizes["dq"])


def test_the_derivative_of_softcap_has_the_error_of_a_large_score() -> None:
    """A score of thousands that nearly cancels is wrong by more than an ulp of what is left, and
    1 - tanh^2 of a small cap changes with that. It may not be 10 % larger."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, 1, 192) for n in (40, 800, 800, 40))
    q, k, v, grad = (100 * q).half(), (30 * k).half(), v.half(), grad.half()
    right = exact(q, k, v, grad, softcap=0.5, scale=0.3)
    args = right.values["dq"], right.sizes["dq"], right.eps["dq"]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention_reference(*leaves, softcap=0.5, scale=0.3)
    (dq,) = torch.autograd.grad(out, leaves[:1], grad)
    judge("dq", dq, *args)
    with pytest.raises(Wrong, match="dq"):
        judge("dq", 1.1 * dq, *args)


def test_a_probability_has_the_error_of_a_large_score_behind_a_small_softcap() -> None:
    """An error of four ulps of the terms of a score, where the cap is not reached. Probabilities
    that are 10 % larger are noticed."""
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(1, n, 1, 216) for n in (11, 800, 800, 11))
    q, k, v, grad = (100 * q).half(), (30 * k).half(), v.half(), grad.half()
    right = exact(q, k, v, grad, softcap=0.5, scale=1.0)
    wide_q, wide_k, wide_grad = (t.double().transpose(1, 2) for t in (q, k, grad))
    terms = (wide_q.square() @ wide_k.square().mT).sqrt()
    scores = wide_q @ wide_k.mT + 2.0**-21 * terms * torch.randn_like(terms)
    p = (0.5 * torch.tanh(scores / 0.5)).softmax(-1).half().double()
    dv = (p.mT @ wide_grad).transpose(1, 2)
    args = right.values["dv"], right.sizes["dv"], right.eps["dv"]
    judge("dv", dv, *args)
    with pytest.raises(Wrong, match="dv"):
        judge("dv", 1.1 * dv, *args)


def test_queries_that_dropout_leaves_nothing_are_alike() -> None:
    """Where one key has all the weight, the other queries have one output, and one error."""
    torch.manual_seed(0)
    q = (torch.randn(1, 500, 1, 16) + 1.5).half()
    k, v = torch.zeros(1, 30, 1, 16).half(), torch.randn(1, 30, 1, 16).half()
    k[:, 10] = 20.0
    grad = torch.randn(1, 1, 1, 16).expand(1, 500, 1, 16).half()
    options = {"dropout_p": 0.5, "dropout_seed": 1, "scale": 1.0}
    sizes = exact(q, k, v, grad, **options).sizes["dk"][0, 10]
    k[:, 10] = 0.0  # the weight is that of all keys
    others = exact(q, k, v, grad, **options).sizes["dk"][0, 10]
    assert sizes.min() > 20 * others.min()


def test_a_share_of_a_sink_that_is_flushed_may_be_missing() -> None:
    """And one that is not may not."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 4, 1, 8).bfloat16() for _ in range(4))
    for logit, is_noticed in ((-88.0, False), (-80.0, True)):  # exp(-88) is below 2^-126
        right = exact(q, k, v, 50 * grad, sink=torch.tensor([logit]))
        args = torch.zeros(1), right.values["dsink"], right.sizes["dsink"], right.eps["dsink"]
        if is_noticed:
            with pytest.raises(Wrong, match="dsink"):
                judge("dsink", *args)
            continue
        judge("dsink", *args)
