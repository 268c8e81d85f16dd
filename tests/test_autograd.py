"""Gradients through the public functions: every input, the LSE, autocast, checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cute_attention import (
    attention,
    attention_reference,
    attention_varlen,
    attention_varlen_reference,
    use_backend,
)
from tolerances import assert_close

NAMES = ("q", "k", "v", "bias", "sink")


@pytest.fixture(autouse=True)
def _reference() -> Any:
    """These tests are about how autograd is attached. For that one backend is enough."""
    with use_backend("reference"):
        yield


def inputs(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """GQA, head_dim_v != head_dim, and no two axes of q, k or v contiguous together."""
    torch.manual_seed(0)
    shapes = {"q": (2, 4, 9, 16), "k": (2, 2, 13, 16), "v": (2, 2, 13, 24)}
    tensors = {
        name: torch.randn(*shape[:-1], shape[-1] + 3)[..., : shape[-1]].transpose(1, 2)
        for name, shape in shapes.items()
    }
    tensors["bias"] = torch.randn(4, 1, 13)
    tensors["sink"] = torch.randn(4)
    return {name: t.to(device, dtype).requires_grad_() for name, t in tensors.items()}


def packed_inputs(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (9, 4, 16), "k": (13, 2, 16), "v": (13, 2, 24), "bias": (3, 1, 1, 8)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["sink"] = torch.randn(4)
    return {name: t.to(device, dtype).requires_grad_() for name, t in tensors.items()}


def offsets(device: str) -> tuple[Tensor, Tensor]:
    """Packed sequences with 5, 0 and 4 queries, and 8, 2 and 3 keys."""
    values = ([0, 5, 5, 9], [0, 8, 10, 13])
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(v, dtype=torch.int32, device=device) for v in values)
    return cu_seqlens_q, cu_seqlens_k


def gradients(
    run: Callable[..., Any], tensors: dict[str, Tensor], wanted: tuple[str, ...] = NAMES
) -> dict[str, Tensor]:
    """The gradients of a weighted sum of the output and the LSE. The weights are not contiguous."""
    out, lse = run(**tensors)
    torch.manual_seed(1)
    weight_out = torch.randn(*out.shape[:-1], 2 * out.shape[-1]).to(out)[..., ::2]
    weight_lse = torch.randn(lse.shape[::-1]).to(lse).permute(*range(lse.dim() - 1, -1, -1))
    grads = torch.autograd.grad(
        (out, lse), [tensors[name] for name in wanted], (weight_out, weight_lse)
    )
    return dict(zip(wanted, grads, strict=True))


def test_dense_gradients_are_those_of_the_formula(device: str) -> None:
    tensors = inputs(device)
    options = {"causal": True, "softcap": 3.0, "return_lse": True}
    actual = gradients(lambda **t: attention(**t, **options), tensors)
    expected = gradients(lambda **t: attention_reference(**t, **options), tensors)
    for name in NAMES:
        assert_close(actual[name], expected[name], "gradient", name=name)


def test_varlen_gradients_are_those_of_the_formula(device: str) -> None:
    tensors, cu_seqlens = packed_inputs(device), offsets(device)

    def run(q: Tensor, k: Tensor, v: Tensor, **extras: Any) -> Any:
        return attention_varlen(
            q, k, v, *cu_seqlens, 5, 8, window=(4, None), return_lse=True, **extras
        )

    def formula(q: Tensor, k: Tensor, v: Tensor, **extras: Any) -> Any:
        return attention_varlen_reference(
            q, k, v, *cu_seqlens, window=(4, None), return_lse=True, **extras
        )

    actual, expected = gradients(run, tensors), gradients(formula, tensors)
    for name in NAMES:
        assert_close(actual[name], expected[name], "gradient", name=name)


@pytest.mark.parametrize(
    "wanted", [c for n in (1, 2, 4) for c in itertools.combinations(NAMES, n)], ids="-".join
)
def test_any_subset_of_the_inputs_can_need_a_gradient(wanted: tuple[str, ...]) -> None:
    every = gradients(lambda **t: attention(**t, return_lse=True), inputs("cpu"))
    tensors = {name: t.detach().requires_grad_(name in wanted) for name, t in inputs("cpu").items()}
    some = gradients(lambda **t: attention(**t, return_lse=True), tensors, wanted)
    for name in wanted:
        assert_close(some[name], every[name], "exact", name=name)


@pytest.mark.parametrize("through", ["out", "lse"])
def test_one_of_the_results_alone(through: str) -> None:
    """Only the output has a gradient, or only the LSE, which does not depend on v."""
    tensors = inputs("cpu")
    index = ("out", "lse").index(through)
    for name in NAMES:
        results = []
        for run in (attention, attention_reference):
            result = run(**tensors, return_lse=True)[index].square().sum()
            results += torch.autograd.grad(result, tensors[name], allow_unused=True)
        if through == "lse" and name == "v":
            assert results[1] is None
            assert torch.count_nonzero(results[0]) == 0
        else:
            assert_close(results[0], results[1], "gradient", name=name)


def test_gradcheck() -> None:
    shapes = ((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 2), (2, 1, 4), (2,))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.autograd.gradcheck(
        lambda q, k, v, bias, sink: attention(
            q, k, v, bias=bias, sink=sink, causal=True, softcap=2.0, return_lse=True,
            dropout_p=0.3, dropout_seed=5,
        ),
        tuple(tensors),
    )  # fmt: skip


def test_no_graph_without_a_need() -> None:
    tensors = inputs("cpu")
    with torch.no_grad():
        assert not attention(**tensors).requires_grad
    with torch.inference_mode():
        assert attention(**tensors).is_inference()
    assert not attention(**{name: t.detach() for name, t in tensors.items()}).requires_grad
    assert attention(**tensors).requires_grad


def test_second_derivatives_raise(device: str) -> None:
    """First derivatives with create_graph are right. To differentiate them is an error, whose
    message says what one can do."""
    tensors = inputs(device)
    out = attention(**tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors["q"], create_graph=True)
    plain = attention_reference(**tensors)
    (expected,) = torch.autograd.grad(plain.square().sum(), tensors["q"])
    assert_close(grad, expected, "gradient", name="q")
    with pytest.raises(RuntimeError, match="attention: second derivatives are not implemented"):
        torch.autograd.grad(grad.sum(), tensors["k"])


@pytest.mark.parametrize("deterministic", ["argument", "torch"])
def test_deterministic_backward_repeats_bitwise(deterministic: str, device: str) -> None:
    tensors = inputs(device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic == "torch")
    try:
        argument = deterministic == "argument"
        runs = [
            gradients(lambda **t: attention(**t, deterministic=argument, return_lse=True), tensors)
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(before)
    for run in runs[1:]:
        for name in NAMES:
            assert torch.equal(run[name], runs[0][name])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_replays_dropout(use_reentrant: bool, device: str) -> None:
    tensors = inputs(device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.5)

    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    torch.manual_seed(7)
    plain = run(q, k, v)
    torch.manual_seed(7)
    recomputed = checkpoint(run, q, k, v, use_reentrant=use_reentrant)
    assert torch.equal(plain, recomputed)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, (q, k, v), weight)
    (recomputed * weight).sum().backward()
    for tensor, grad in zip((q, k, v), expected, strict=True):
        assert torch.equal(tensor.grad, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype, device: str) -> None:
    tensors = inputs(device)
    with torch.autocast(device, dtype=dtype):
        out, lse = attention(**tensors, return_lse=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention(
            *(tensors[name].transpose(1, 2) for name in ("q", "k", "v")), enable_gqa=True
        )
        out.float().sum().backward()  # inside, as some training loops do
    assert out.dtype == sdpa.dtype == dtype
    assert lse.dtype == torch.float32
    cast = {
        name: t.detach().to(dtype if name != "sink" else t.dtype) for name, t in tensors.items()
    }
    assert torch.equal(out, attention(**cast))
    for name in NAMES:
        assert tensors[name].grad.dtype == torch.float32
        assert tensors[name].grad.isfinite().all()


def test_autocast_leaves_float64_alone() -> None:
    tensors = inputs("cpu", torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(**tensors)
    assert out.dtype == torch.float64
    assert torch.equal(out, attention(**tensors))


def test_autocast_mixes_dtypes() -> None:
    """Under autocast q, k and v may come in different dtypes, as to PyTorch's attention."""
    tensors = inputs("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(tensors["q"].bfloat16(), tensors["k"], tensors["v"].half())
    assert out.dtype == torch.bfloat16


def test_saved_tensors_are_protected() -> None:
    """An input that is changed in place before the backward causes an error, not a wrong
    gradient."""
    tensors = inputs("cpu")
    q = tensors["q"] * 1.0
    out = attention(q, tensors["k"], tensors["v"])
    q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_functional_transforms(device: str) -> None:
    """torch.func.vmap and grad, one in the other: gradients of each of a batch of problems."""
    q, k, v = (inputs(device)[name].detach() for name in ("q", "k", "v"))
    stacked = torch.stack([q, 2 * q], dim=1)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    transform = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(1, None, None))
    grads = transform(stacked, k, v)
    for index in range(2):
        leaves = [stacked[:, index].clone().requires_grad_(), k.clone().requires_grad_()]
        expected = torch.autograd.grad(loss(*leaves, v), leaves)
        for actual, wanted in zip(grads, expected, strict=True):
            assert_close(actual[index], wanted, "rounding")


def test_forward_mode_is_refused() -> None:
    """It raises an error, instead of an answer of zeros."""
    q, k, v = (inputs("cpu")[name].detach() for name in ("q", "k", "v"))
    with pytest.raises(RuntimeError, match=r"forward mode AD|jvp"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward mode AD|jvp"):
        attention(forward_ad.make_dual(q, q), k, v)
