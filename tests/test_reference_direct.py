"""The direct formula against closed forms, PyTorch's own attention and finite differences."""

from __future__ import annotations

import dataclasses
import doctest
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cute_attention import attention_reference, attention_varlen_reference
from cute_attention.semantics import formula
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward
from reference_cases import (
    Case,
    Inputs,
    make_call,
    make_grads,
    make_inputs,
    options,
    run_blockwise,
    run_direct,
)
from tolerances import assert_close

RUNS = pytest.mark.parametrize("run", [run_direct, run_blockwise], ids=["direct", "blockwise"])


def test_examples_of_the_docstrings() -> None:
    failed, attempted = doctest.testmod(formula)
    assert attempted >= 6 and not failed


@RUNS
@pytest.mark.parametrize("lengths", [(1, 1), (3, 5), (5, 3), (4, 4), (1, 6), (6, 1)], ids=str)
def test_masks_against_the_contract(run: Callable, lengths: tuple[int, int]) -> None:
    """Equal scores and unit vectors as values: the output is 1/n on the n keys that a query
    sees."""
    seqlen_q, seqlen_k = lengths
    shift = seqlen_k - seqlen_q
    windows = [None, (0, 0), (1, None), (None, 1), (2, 3), (0, None), (None, 0), (99, 99)]
    windows += [(2**63 - 1, 1), (1, 2**63 - 1)]  # the largest that there are
    for causal in (False, True):
        for window in windows:
            case = Case(
                "mask", 1, seqlen_q, seqlen_k, heads=1, heads_kv=1, head_dim_v=seqlen_k,
                causal=causal, window=window, scale=0.0,
            )  # fmt: skip
            inputs = make_inputs(case)
            values = torch.eye(seqlen_k).double()[None, :, None].requires_grad_()
            results = run(case, dataclasses.replace(inputs, v=values))
            left, right = window or (None, None)
            for i in range(seqlen_q):
                sees = [
                    (not causal or j <= i + shift)
                    and (left is None or j >= i + shift - left)
                    and (right is None or j <= i + shift + right)
                    for j in range(seqlen_k)
                ]
                n = sum(sees)
                expected = [seen / n if n else 0.0 for seen in sees]
                assert results["out"][0, i, 0].tolist() == pytest.approx(expected, abs=1e-15)
                lse = math.log(n) if n else -math.inf
                assert results["lse"][0, 0, i].item() == pytest.approx(lse, abs=1e-14)


def test_the_causal_picture() -> None:
    """The 0/1 picture in the docstring, at its right, is what is computed."""
    q, k = torch.zeros(1, 5, 1, 4), torch.zeros(1, 3, 1, 4)
    out = attention_reference(q, k, torch.eye(3)[None, :, None], causal=True)
    lines = (attention_reference.__doc__ or "").splitlines()
    first = next(n for n, line in enumerate(lines) if "seqlen_q 5, seqlen_k 3:" in line)
    drawn = [[int(digit) for digit in line.split()[-3:]] for line in lines[first : first + 5]]
    assert (out[0, :, 0] > 0).int().tolist() == drawn == [
        [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1],
    ]  # fmt: skip


@RUNS
def test_closed_forms(run: Callable) -> None:
    """One key: the output is its value, the LSE its score, after softcap, ALiBi, bias and sink."""
    case = Case("one", 1, 1, 1, 1, 1, softcap=2.0, alibi="heads", bias="b h q k", scale=0.5)
    inputs = make_inputs(case)
    assert inputs.bias is not None
    score = 2 * math.tanh(0.5 * (inputs.q * inputs.k).sum().item() / 2) + inputs.bias.item()
    results = run(case, inputs)
    assert results["lse"].item() == pytest.approx(score, abs=1e-14)
    assert_close(results["out"], inputs.v.detach(), "rounding", name="out")

    sink = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    results = run(case, dataclasses.replace(inputs, sink=sink))
    share = math.exp(score) / (math.exp(score) + math.exp(0.7))
    assert_close(results["out"], inputs.v.detach() * share, "rounding", name="out")
    assert results["lse"].item() == pytest.approx(
        math.log(math.exp(score) + math.exp(0.7)), abs=1e-14
    )


@RUNS
def test_alibi_distance_is_from_the_diagonal(run: Callable) -> None:
    case = Case("alibi", 1, 3, 7, 2, 2, scale=0.0)
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64)
    results = run(case, dataclasses.replace(make_inputs(case), alibi_slopes=slopes))
    for h in range(2):
        for i in range(3):
            total = sum(math.exp(-slopes[h].item() * abs(i + 4 - j)) for j in range(7))
            assert results["lse"][0, h, i].item() == pytest.approx(math.log(total), abs=1e-14)


@RUNS
def test_gqa_reads_the_right_head(run: Callable) -> None:
    case = Case("gqa", heads=6, heads_kv=2)
    inputs = make_inputs(case)
    repeated = dataclasses.replace(
        inputs,
        k=inputs.k.detach().repeat_interleave(3, dim=2).requires_grad_(),
        v=inputs.v.detach().repeat_interleave(3, dim=2).requires_grad_(),
    )
    grouped, plain = run(case, inputs), run(dataclasses.replace(case, heads_kv=6), repeated)
    for name in ("out", "lse", "dq"):
        assert_close(grouped[name], plain[name], "gradient", name=name)
    for name in ("dk", "dv"):
        assert_close(grouped[name], plain[name].unflatten(2, (2, 3)).sum(3), "gradient", name=name)


@RUNS
def test_rows_without_keys(run: Callable) -> None:
    """Whatever hides the keys, the output is 0, the LSE -inf or that of the sink, and the
    gradient of q 0."""
    causal = Case("causal", seqlen_q=12, seqlen_k=5, causal=True)
    hidden = Case("bias", seqlen_q=12, seqlen_k=5, bias="b h q k")
    for case in (causal, hidden):
        for sink in (False, True):
            case = dataclasses.replace(case, sink=sink)
            inputs = make_inputs(case)
            if inputs.bias is not None:
                with torch.no_grad():
                    inputs.bias[:, :, :7] = -torch.inf
            results = run(case, inputs)
            assert not any(value.isnan().any() for value in results.values())
            assert not results["out"][:, :7].any() and not results["dq"][:, :7].any()
            assert results["out"][:, 7:].all()
            expected = torch.full((2,), -torch.inf).double() if inputs.sink is None else inputs.sink
            expected = expected.detach()[None, :, None].expand(2, 2, 7)
            assert_close(results["lse"][:, :, :7], expected, "rounding", name="lse")


@RUNS
def test_gradients_of_rows_without_keys_stop_there(run: Callable) -> None:
    """Incoming gradients of rows without keys may be NaN or -inf, such as those of lse**2. They
    reach no other gradient."""
    masked = Case("window", window=(3, 2), seqlen_q=80, seqlen_k=20)
    hidden = Case("bias", bias="b h q k")
    for case in (masked, hidden, dataclasses.replace(masked, sink=True)):
        inputs = make_inputs(case)
        if inputs.bias is not None:
            with torch.no_grad():
                inputs.bias[:, :, 5:9] = -torch.inf
        clean = run(case, inputs)
        blind = ~(clean["out"] != 0).any(-1)  # (batch, seqlen_q, heads)
        assert blind.any() and not blind.all()

        def poison(
            out: Tensor, lse: Tensor, case: Case = case, blind: Tensor = blind
        ) -> tuple[Tensor, Tensor]:
            grad_out, grad_lse = make_grads(out, lse)
            if not case.bias:
                grad_out = grad_out.masked_fill(blind[..., None], torch.nan)
            if not case.sink:
                grad_lse = grad_lse.masked_fill(blind.transpose(1, 2), -torch.inf)
            return grad_out, grad_lse

        for name, value in run(case, inputs, None, poison).items():
            assert_close(value, clean[name], "gradient", name=name)


# What PyTorch's attention can express: (case, its keyword arguments). Its causal mask is top-left
# aligned.
SDPA_CASES = [
    (Case("plain"), {}),
    (Case("gqa", heads=6, heads_kv=2), {"enable_gqa": True}),
    (Case("scale", scale=0.9), {"scale": 0.9}),
    (Case("causal_square", seqlen_q=40, seqlen_k=40, causal=True), {"is_causal": True}),
    (Case("causal_bottom_right", causal=True), {"attn_mask": "causal"}),
    (Case("window", window=(6, 2)), {"attn_mask": "window"}),
    (Case("bias", bias="b h q k"), {"attn_mask": "bias"}),
    (
        Case("bias_keys", bias="h 1 k", heads=6, heads_kv=2),
        {"attn_mask": "bias", "enable_gqa": True},
    ),
    (Case("alibi", alibi="heads"), {"attn_mask": "alibi"}),
    (Case("values", head_dim_v=40), {}),
    (Case("dropout_none", dropout_p=0.0), {"dropout_p": 0.0}),
]  # fmt: skip


@RUNS
@pytest.mark.parametrize(
    ("case", "arguments"), SDPA_CASES, ids=[str(case) for case, _ in SDPA_CASES]
)
def test_equals_pytorch(run: Callable, case: Case, arguments: dict) -> None:
    inputs = make_inputs(case)
    i = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
    j = torch.arange(case.seqlen_k)
    masks = {
        "causal": j <= i,
        "window": (j >= i - 6) & (j <= i + 2),
        "bias": inputs.bias,
        "alibi": None
        if inputs.alibi_slopes is None
        else -inputs.alibi_slopes[:, None, None] * (i - j).abs(),
    }
    if "attn_mask" in arguments:
        arguments = {**arguments, "attn_mask": masks[arguments["attn_mask"]]}
    leaves = inputs.differentiable
    transposed = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    expected = scaled_dot_product_attention(*transposed, **arguments).transpose(1, 2)
    torch.manual_seed(1)
    grad_out = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, leaves, grad_out)
    out, actual = differentiate(run, case, inputs, grad_out)
    assert_close(out, expected.detach(), "rounding", name="out")
    for name, grad, value in zip(("dq", "dk", "dv", "dbias"), grads, actual, strict=False):
        assert_close(value, grad, "gradient", name=name)


def differentiate(
    run: Callable, case: Case, inputs, grad_out: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Output and its gradients, without the LSE's."""
    if run is run_direct:
        out = attention_reference(inputs.q, inputs.k, inputs.v, **options(case, inputs))
        return out.detach(), list(torch.autograd.grad(out, inputs.differentiable, grad_out))
    call = make_call(case, inputs)
    out, lse = blockwise_forward(call)
    needs = (inputs.bias is not None, inputs.sink is not None)
    grads = blockwise_backward(grad_out, None, out, lse, call, needs)
    return out, [grad for grad in grads if grad is not None]


GRADCHECK_CASES = [
    Case("plain"),
    Case("causal_softcap", causal=True, softcap=1.2, seqlen_q=4, seqlen_k=3),
    Case("gqa_window_sink", heads=4, heads_kv=2, window=(1, 1), sink=True),
    Case("bias_full", bias="b h q k"),
    Case("bias_rows_and_keys", bias="q k", causal=True),
    Case("bias_keys", bias="b 1 1 k", heads=4, heads_kv=2),
    Case("bias_rows", bias="1 h q 1", sink=True),
    Case("bias_one", bias="1"),
    Case("dropout_alibi", dropout_p=0.4, alibi="batch, heads", sink=True),
    Case("rows_without_keys", seqlen_q=5, seqlen_k=2, causal=True, sink=True),
]


class BlockwiseFunction(torch.autograd.Function):
    """The blockwise functions as autograd sees them, for gradcheck."""

    @staticmethod
    def forward(ctx, case, slopes, q, k, v, bias, sink):
        ctx.call = make_call(case, Inputs(q, k, v, slopes, bias, sink))
        out, lse = blockwise_forward(ctx.call)
        ctx.save_for_backward(out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        needs = (ctx.needs_input_grad[5], ctx.needs_input_grad[6])
        grads = blockwise_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.call, needs)
        return None, None, *grads


@pytest.mark.parametrize("blockwise", [False, True], ids=["direct", "blockwise"])
@pytest.mark.parametrize("case", GRADCHECK_CASES, ids=str)
def test_gradcheck(case: Case, blockwise: bool) -> None:
    """Output and LSE against finite differences, for every argument that has a gradient."""
    if case.seqlen_q == Case("").seqlen_q:
        case = dataclasses.replace(case, seqlen_q=3, seqlen_k=4)
    case = dataclasses.replace(case, head_dim=2, head_dim_v=3)
    inputs = make_inputs(case)

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        left = list(rest)
        bias = left.pop(0) if inputs.bias is not None else None
        sink = left.pop(0) if inputs.sink is not None else None
        if blockwise:
            out, lse = BlockwiseFunction.apply(case, inputs.alibi_slopes, q, k, v, bias, sink)
        else:
            replaced = dataclasses.replace(inputs, bias=bias, sink=sink)
            out, lse = attention_reference(q, k, v, **options(case, replaced), return_lse=True)
        # Finite differences of -inf are NaN; what rows without keys give is tested by name.
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attend, inputs.differentiable)


def test_second_derivatives_of_the_direct_formula() -> None:
    case = Case("all", 1, 2, 3, 2, 1, 2, 2, causal=True, softcap=1.5, bias="q k", sink=True)
    inputs = make_inputs(case)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        replaced = dataclasses.replace(inputs, bias=tensors[3], sink=tensors[4])
        return attention_reference(*tensors[:3], **options(case, replaced), return_lse=True)

    assert torch.autograd.gradgradcheck(attend, inputs.differentiable)


WRONG_CALLS = {
    "k has shape [2, 3], expected 4 dimensions": {"k": (2, 3)},
    "head_dim of q and k must agree": {"k": (1, 4, 2, 9)},
    "all but head_dim_v of k and v": {"v": (1, 5, 2, 8)},
    "q has batch 1, k has batch 3": {"k": (3, 4, 2, 8), "v": (3, 4, 2, 8)},
    "q has 4 heads, expected a multiple of k's 3": {"k": (1, 4, 3, 8), "v": (1, 4, 3, 8)},
    "window is (-1, 0), expected no negative side": {"window": (-1, 0)},
    "dropout_p is 1.5": {"dropout_p": 1.5},
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_wrong_calls(message: str) -> None:
    call = {"q": (1, 3, 4, 8), "k": (1, 4, 2, 8), "v": (1, 4, 2, 8), **WRONG_CALLS[message]}
    tensors = {name: torch.zeros(call.pop(name)) for name in ("q", "k", "v")}
    with pytest.raises(ValueError) as caught:
        attention_reference(**tensors, **call)
    assert str(caught.value).startswith("attention_reference: ") and message in str(caught.value)


def test_wrong_cu_seqlens() -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens have shapes \[2\] and \[3\]"):
        attention_varlen_reference(x, x, x, torch.tensor([0, 4]), torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("starts", [[0, 3, 1, 4], [-1, 0, 0, 4], [0, 1, 2, 5]], ids=str)
def test_cu_seqlens_that_no_rows_have(starts: list[int], side: str) -> None:
    """Slices of such rows would be shorter, or others, and the output of another length."""
    x, whole, wrong = torch.zeros(4, 2, 8), torch.tensor([0, 1, 2, 4]), torch.tensor(starts)
    offsets = (wrong, whole) if side == "q" else (whole, wrong)
    with pytest.raises(ValueError) as caught:
        attention_varlen_reference(x, x, x, *offsets)
    assert f"cu_seqlens_{side} is {starts}, expected numbers from 0 to 4" in str(caught.value)
