"""The short way of a call that was made before: when it is taken, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_stand_ins
from cute_attention import (
    FallbackWarning,
    attention,
    attention_reference,
    attention_varlen,
    call,
    use_backend,
)
from cute_attention.arguments import Arguments
from cute_attention.dispatch import select as selection
from kernel_stand_ins import Kernels, qkv
from tolerances import assert_close

UNCOUNTED = call._attend_checked


def test_the_second_call_goes_the_short_way(kernels: Kernels) -> None:
    """A plan serves all lengths, so that decoding makes only one."""
    for seqlen_k in range(1, 9):
        tensors = qkv(1, seqlen_k)
        out = attention(*tensors, causal=True)
        assert_close(out, attention_reference(*tensors, causal=True), "rounding")
    assert kernels.checked == 1
    assert kernels.ran == ["forward.output", *["brief_forward.output"] * 7]


def test_packed_calls(kernels: Kernels) -> None:
    k, v = (t[0] for t in qkv()[1:])
    for ends in ((0, 5, 7), (0, 3, 7)):
        offsets = torch.tensor(ends, dtype=torch.int32)
        out = attention_varlen(k, k, v, offsets, offsets, 5, 5, return_lse=True)
        expected = attention_varlen(
            k, k, v, offsets, offsets, 5, 5, return_lse=True, backend="reference"
        )
        for one, other in zip(out, expected, strict=True):
            assert torch.equal(one, other)
    assert kernels.ran == ["forward", "brief_packed_forward"]
    attention_varlen(k, k, v, offsets.repeat_interleave(2)[::2], offsets, 5, 5, return_lse=True)
    before = kernels.checked
    with pytest.raises(TypeError, match="max_seqlen_q is a bool"):
        attention_varlen(k, k, v, offsets, offsets, True, 5, return_lse=True)
    assert kernels.checked == before + 1


def test_the_gradient_of_packed_calls(kernels: Kernels) -> None:
    k, v = (t[0].requires_grad_() for t in qkv()[1:])
    offsets = torch.tensor((0, 5, 7), dtype=torch.int32)
    arguments = (k, k, v, offsets, offsets, 5, 5)
    expected = torch.autograd.grad(attention_varlen(*arguments, backend="reference").sum(), (k, v))
    for _ in range(3):
        grads = torch.autograd.grad(attention_varlen(*arguments).sum(), (k, v))
        for one, other in zip(grads, expected, strict=True):
            assert_close(one, other, "gradient")
    brief = ["brief_packed_forward", "brief_packed_backward"]
    assert kernels.ran == ["forward", "backward", *brief * 2]


def test_the_gradient_of_the_short_way(kernels: Kernels) -> None:
    """Calls with the LSE and without it take turns. Each is right, in every grad mode."""
    leaves = [t.requires_grad_() for t in qkv()]
    for return_lse in (False, True, False):
        for _ in range(2):
            results = attention(*leaves, causal=True, return_lse=return_lse)
            formula = attention_reference(*leaves, causal=True, return_lse=return_lse)
            total, expected = (
                sum(part.square().sum() for part in (r if return_lse else (r,)))
                for r in (results, formula)
            )
            grads = torch.autograd.grad(total, leaves)
            for one, other in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
                assert_close(one, other, "gradient")
        with torch.no_grad():
            assert not attention(*leaves, causal=True).requires_grad
        with torch.inference_mode():
            assert attention(*leaves, causal=True).is_inference()
        assert not attention(*(t.detach() for t in leaves), causal=True).requires_grad
    assert "backward" in kernels.ran
    out = attention(*leaves, causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        torch.autograd.grad(grad.sum(), leaves[1])


ALIASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"causal": True}, {"causal": 1}, "causal is an int"),
    ({"causal": True}, {"causal": 1.0}, "causal is a float"),
    ({"return_lse": False}, {"return_lse": 0}, "return_lse is an int"),
    ({"scale": 1.0}, {"scale": True}, "scale is a bool"),
    ({"softcap": 1}, {"softcap": True}, "softcap is a bool"),
    ({"window": (1, 0)}, {"window": (True, 0)}, "window's left side is a bool"),
    ({"window": (1, 0)}, {"window": (1, 0.0)}, "window's right side is a float"),
    ({"window": (1, 0)}, {"window": "10"}, "window is a str"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), ALIASES, ids=lambda value: str(value))
def test_keys_do_not_alias(
    right: dict[str, Any], wrong: dict[str, Any], message: str, kernels: Kernels
) -> None:
    for _ in range(2):
        attention(*qkv(), **right)
        with pytest.raises(TypeError, match=f"attention: {message}, expected"):
            attention(*qkv(), **wrong)


def test_options_that_are_no_key(kernels: Kernels) -> None:
    """Calls whose options are lists or NumPy scalars are right, and each is checked."""
    tensors = qkv()
    others: tuple[dict[str, Any], ...] = (
        {"window": [3, 0]}, {"scale": np.float64(0.5)}, {"scale": np.float32(0.5)},
    )  # fmt: skip
    for options in others:
        for _ in range(2):
            out = attention(*tensors, **options)
            assert_close(out, attention_reference(*tensors, **options), "rounding")
    assert kernels.checked == 6
    assert len(call.plans) == 0


def test_what_asks_for_a_backend_is_part_of_the_key(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend may come from the argument, the context, or the environment as it is at the
    call."""
    tensors = qkv()

    def ran_on_a_kernel(**options: Any) -> bool:
        before = len(kernels.ran)
        attention(*tensors, **options)
        return len(kernels.ran) > before

    for _ in range(2):
        assert ran_on_a_kernel()
        assert not ran_on_a_kernel(backend="reference")
        with use_backend("reference"):
            assert not ran_on_a_kernel()
            assert ran_on_a_kernel(backend="sm80")
        monkeypatch.setenv("CUTE_ATTENTION_BACKEND", "reference")
        assert not ran_on_a_kernel()
        monkeypatch.delenv("CUTE_ATTENTION_BACKEND")
        assert ran_on_a_kernel()


def test_the_backward_is_chosen_when_it_first_runs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a plan, but again after a backend has failed to answer."""
    lasting = [False, True]

    def choose(problem: Any, requested: str) -> tuple[str, bool]:
        return "sm80", problem.direction == "forward" or lasting.pop(0)

    monkeypatch.setattr(selection, "_choose", choose)
    leaves = [t.requires_grad_() for t in qkv()]
    attention(*leaves)
    for left in ([False, True], [True], [], [], []):
        out = attention(*leaves)
        assert lasting == left
        torch.autograd.grad(out.sum(), leaves)
    assert kernels.ran == ["forward", *["brief_forward", "brief_backward"] * 5]


def test_what_asks_at_the_forward_holds_for_the_backward(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [t.requires_grad_() for t in qkv()]
    for backward in ("backward", "brief_backward"):
        plain = attention(*leaves)
        with monkeypatch.context() as patch:
            patch.setenv("CUTE_ATTENTION_BACKEND", "reference")
            before = len(kernels.ran)
            other = attention(*leaves)
            torch.autograd.grad(plain.sum(), leaves)
            assert kernels.ran[before:] == [backward]
        torch.autograd.grad(other.sum(), leaves)
        assert kernels.ran[before:] == [backward]


class Subclass(Tensor):
    """A tensor of another type, as libraries have them."""


def test_other_tensors_and_modes_go_the_long_way(kernels: Kernels) -> None:
    q, k, v = qkv()
    attention(q, k, v)
    attention(q, k, v)
    assert kernels.checked == 1
    assert attention(q.as_subclass(Subclass), k, v).shape == (2, 5, 4, 24)
    assert kernels.checked == 2
    mapped = torch.vmap(attention)(torch.stack([q, q]), torch.stack([k, k]), torch.stack([v, v]))
    assert_close(mapped[1], attention_reference(q, k, v), "rounding")
    assert attention(q.to("meta"), k.to("meta"), v.to("meta")).is_meta
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward"):
        attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert_close(compiled(q, k, v), attention(q, k, v), "exact")


def test_autocast_takes_the_short_way(kernels: Kernels) -> None:
    """Training under autocast calls with fp32 tensors, or some of each dtype, again and again."""
    q, k, v = qkv()
    for round_of_calls in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(q, k, v.bfloat16()).dtype == torch.bfloat16
        assert kernels.checked == 1, round_of_calls
    assert attention(q, k, v).dtype == q.dtype
    assert kernels.checked == 2


def test_modes_see_the_ops_with_all_their_arguments(kernels: Kernels) -> None:
    """So a policy of checkpoints or a tracer knows one op for each direction, whether a call of its
    kind has been made before or not."""
    tensors = qkv()
    seen = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(op))
            return op(*args, **kwargs or {})

    for _ in range(2):
        attention(*tensors)
        with Names():
            attention(*tensors)
    assert [name for name in seen if "cute_attention" in name] == [
        "cute_attention.forward.output"
    ] * 2
    assert kernels.ran[-2:] == ["brief_forward.output", "forward.output"]


def test_options_reach_the_brief_op(kernels: Kernels) -> None:
    """Exactly, whatever their decimals."""
    tensors = qkv()
    for scale, softcap, window in ((1 / 3, None, (2, 0)), (1e-30, 1e-5, None), (7, 2, (0, None))):
        options = {"scale": scale, "softcap": softcap, "window": window}
        first, second = (attention(*tensors, return_lse=True, **options) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
    assert kernels.ran == ["forward", "brief_forward"] * 3


WRONG: list[tuple[Callable[[], list[Any]], type[Exception], str]] = [
    (lambda: [qkv()[0], *qkv(5, 8)[1:2], qkv()[2]], ValueError, "v has shape"),
    (lambda: [qkv()[0][:1], *qkv()[1:]], ValueError, r"k has shape .*batch must match q"),
    (lambda: [qkv()[0][:, :, :3], *qkv()[1:]], ValueError, "expected heads_kv to divide heads"),
    (lambda: [qkv()[0], qkv()[1].double(), qkv()[2]], TypeError, "k has dtype torch.float64"),
    (lambda: [qkv()[0], None, qkv()[2]], TypeError, "k is None"),
    (lambda: [None, *qkv()[1:]], TypeError, "q is None"),
]


@pytest.mark.parametrize(("tensors", "error", "message"), WRONG)
def test_what_the_op_refuses_is_said_in_our_words(
    tensors: Callable[[], list[Any]], error: type[Exception], message: str, kernels: Kernels
) -> None:
    for grad in (False, True):
        attention(*(t.requires_grad_(grad) for t in qkv()))
        with pytest.raises(error, match=f"^attention: .*{message}"):
            attention(*tensors())


def test_a_failure_of_the_op_is_raised(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    attention(*tensors)

    def fails(arguments: Arguments) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(kernel_stand_ins, "refuse", fails)
    with pytest.raises(RuntimeError, match="launch failed"):
        attention(*tensors)


def test_plans_do_not_pile_up(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_MOST_PLANS", 3)
    for scale in range(1, 9):
        attention(*qkv(), scale=scale)
        assert 1 <= len(call.plans) <= 3


def test_the_warning_of_falling_back_points_at_the_caller(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(problem: Any, requested: str) -> tuple[str, bool]:
        selection._warn_of_fallback((), "")
        return "reference", True

    monkeypatch.setattr(selection, "_choose", choose)
    monkeypatch.setattr(call, "_attend_checked", UNCOUNTED)
    monkeypatch.setattr(selection, "_warned", {})
    with pytest.warns(FallbackWarning) as caught:
        attention(*qkv())
    assert [warning.filename for warning in caught] == [__file__]
