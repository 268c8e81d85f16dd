"""Random legal calls: a fixed set of seeds on a GPU, and on the CPU whether the generator makes
legal calls and its check notices what is wrong."""

from __future__ import annotations

import pytest
import torch

from cute_attention.bench.roundings import exact
from random_calls import GPU_WAYS, ON_CPU, Limits, draw
from random_checks import Wrong, check, compare, judge, run
from random_tensors import make

SMALL = Limits(scores=20_000)
ON_GPU = Limits(scores=300_000, ways=ON_CPU + GPU_WAYS, poison=("bias",))
DENSE = Limits(scores=20_000, kinds=("dense", "packed"))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_calls_are_legal_and_the_reference_backend_is_right(first: int) -> None:
    for seed in range(first, first + 20):
        check(draw(seed, SMALL), "cpu", "reference")


def test_a_call_is_a_function_of_its_seed() -> None:
    one, other = (make(draw(5, DENSE), "cpu") for _ in range(2))
    assert one.drawn == other.drawn
    for left, right in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(left.nan_to_num(), right.nan_to_num())


def test_a_wrong_result_is_noticed() -> None:
    """Of each result the largest number is changed. Inputs are standard normal: in others one
    number may be all rounding."""
    noticed = set()
    for call in (draw(seed, DENSE) for seed in range(120)):
        if call.numbers != "normal" or call.options:
            continue
        made = make(call, "cpu")
        found = run(made, "reference")
        compare(made, found)
        for name, result in found.items():
            if not result.numel() or result.double().abs().nan_to_num(0, 0, 0).max() < 1e-3:
                continue
            if name == "dbias" and "k" not in str(call.bias):
                continue  # what serves all keys alike has a gradient of 0
            wrong = result.clone()
            place = wrong.double().abs().nan_to_num(0, 0, 0).argmax()
            wrong.view(-1)[place] *= 1.25
            with pytest.raises(Wrong, match=name):
                compare(made, {**found, name: wrong})
            noticed.add(name)
    assert noticed == {"out", "lse", "dq", "dk", "dv", "dbias", "dsink"}


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
    changed = k + 1e-3 * torch.randn(k.shape).half()  # keys that are none
    assert exact(q, changed, v, 0 * grad, grad_lse=grad_lse).sizes["dq"].max() < args[1].max() / 5


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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::cute_attention.FallbackWarning")
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_on_a_gpu(first: int) -> None:
    wrong = []
    for seed in range(first, first + 50):
        call = draw(seed, ON_GPU)
        try:
            check(call, "cuda")
        except Wrong as error:
            wrong.append(f"--seed {seed} --scores {ON_GPU.scores}: {error}: {call}")
    assert not wrong, "\n".join(wrong)
