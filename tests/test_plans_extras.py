"""The short way of calls with sinks, slopes, biases and dropout: that it is taken, changes nothing,
and refuses what the checks refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_stand_ins
from cute_attention import attention, attention_reference, attention_varlen, call
from kernel_stand_ins import Kernels, qkv
from tolerances import assert_close


@pytest.mark.parametrize("kind", [Tensor, torch.nn.Parameter])
def test_a_sink_goes_the_short_way(kernels: Kernels, kind: type) -> None:
    """A plan serves any sink, and no call without one; gradients reach the sink alone, too."""
    tensors = qkv()
    for factor in (1.0, 2.0, 3.0):
        sink = torch.arange(4.0) * factor
        sink = torch.nn.Parameter(sink) if kind is torch.nn.Parameter else sink.requires_grad_()
        out = attention(*tensors, sink=sink)
        expected = attention_reference(*tensors, sink=sink)
        assert_close(out, expected, "rounding")
        grads = [torch.autograd.grad(o, sink, torch.ones_like(o))[0] for o in (out, expected)]
        assert_close(*grads, "gradient")
    assert kernels.checked == 1
    assert kernels.ran == ["forward", "backward"] * 3
    attention(*tensors)
    assert kernels.checked == 2
    assert_close(attention(*tensors, sink=None), attention_reference(*tensors), "rounding")
    for wrong, error in ((sink.double(), TypeError), (sink[:3], ValueError), (True, TypeError)):
        with pytest.raises(error, match="sink"):
            attention(*tensors, sink=wrong)  # type: ignore[arg-type]


def test_packed_calls_with_a_sink(kernels: Kernels) -> None:
    k, v = (t[0] for t in qkv()[1:])
    offsets = torch.tensor((0, 5, 7), dtype=torch.int32)
    for sink in (torch.tensor([0.5, -1.0]), torch.tensor([3.0, 2.0])):
        packed = (k, k, v, offsets, offsets, 5, 5)
        out = attention_varlen(*packed, sink=sink)
        assert torch.equal(out, attention_varlen(*packed, sink=sink, backend="reference"))
    assert kernels.ran == ["forward.output"] * 2
    assert kernels.checked == 3  # once for the kernels, and at each call of the reference


# Options of a call, other numbers at each turn; and how many kinds of calls these are.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "slopes": lambda turn: {"alibi_slopes": torch.rand(4) * turn},
    "slopes of each entry": lambda turn: {"alibi_slopes": torch.rand(2, 8)[:, ::2]},
    "bias": lambda turn: {"bias": torch.randn(2, 4, 5, 7)},
    "bias of two dimensions": lambda turn: {"bias": torch.randn(5, 7)},
    "bias, broadcast": lambda turn: {"bias": torch.randn(4, 1, 7) if turn % 2 else torch.ones(7)},
    "dropout": lambda turn: {"dropout_p": 0.5, "dropout_seed": torch.tensor([turn])},
    "dropout, seed without dimensions": lambda turn: {
        "dropout_p": 0.5,
        "dropout_seed": torch.tensor(turn),
    },
    "dropout, seed as int": lambda turn: {"dropout_p": 0.5, "dropout_seed": turn - 2},
    "all dropped": lambda turn: {"dropout_p": 1, "dropout_seed": turn},
    "all": lambda turn: {
        "dropout_seed": 2**63 + turn,
        "bias": torch.randn(1, 4, 5, 1),
        "sink": torch.randn(4),
        "dropout_p": 0.25,
        "alibi_slopes": torch.randn(4),
        "softcap": 3.0,
        "return_lse": True,
    },
}


def results_of(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("kind", KINDS)
def test_extras_go_the_short_way(kernels: Kernels, kind: str) -> None:
    """One plan serves them whatever their numbers, and gives what the long way gives."""
    for turn in range(4):
        tensors, options = qkv(), KINDS[kind](turn)
        out = results_of(attention(*tensors, **options))
        assert kernels.checked == turn + 1  # the reference is checked each time, and this one once
        expected = results_of(attention(*tensors, **options, backend="reference"))
        for one, other in zip(out, expected, strict=True):
            assert torch.equal(one, other)
    assert kernels.ran == ["forward" if kind == "all" else "forward.output"] * 4
    assert len(call.plans) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_extras(kernels: Kernels, kind: str) -> None:
    for turn in range(3):
        options = KINDS[kind](turn)
        leaves = [t.requires_grad_() for t in qkv()]
        leaves += [options[n].requires_grad_() for n in ("bias", "sink") if n in options]
        grads = []
        for backend in ("auto", "reference"):
            out = results_of(attention(*leaves[:3], **options, backend=backend))
            grads.append(torch.autograd.grad(sum(t.square().sum() for t in out), leaves))
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)
    assert kernels.checked == 1 + 3
    assert kernels.ran == ["forward", "backward"] * 3


def test_the_gradient_of_a_bias_alone(kernels: Kernels) -> None:
    tensors = qkv()
    for _ in range(3):
        bias = torch.nn.Parameter(torch.randn(4, 5, 7))
        out, expected = attention(*tensors, bias=bias), attention_reference(*tensors, bias=bias)
        grads = [torch.autograd.grad(o.square().sum(), bias)[0] for o in (out, expected)]
        assert_close(*grads, "gradient")
        with torch.no_grad():
            assert not attention(*tensors, bias=bias).requires_grad
    assert kernels.checked == 1


@pytest.mark.parametrize("kind", ["slopes of each entry", "dropout", "all"])
def test_packed_calls_with_extras(kernels: Kernels, kind: str) -> None:
    k, v = (t[0] for t in qkv()[1:])
    offsets = torch.tensor((0, 5, 7), dtype=torch.int32)
    for turn in range(3):
        options = KINDS[kind](turn)
        options = {n: x[:, :2] if n == "bias" else x for n, x in options.items()}
        for name in ("alibi_slopes", "sink"):
            if name in options:
                options[name] = options[name][..., :2]
        packed = (k, k, v, offsets, offsets, 5, 5)
        out = results_of(attention_varlen(*packed, **options))
        expected = results_of(attention_varlen(*packed, **options, backend="reference"))
        for one, other in zip(out, expected, strict=True):
            assert torch.equal(one, other)
    assert kernels.checked == 1 + 3


def test_seeds_come_from_the_generator_as_on_the_long_way(kernels: Kernels) -> None:
    """A call draws one seed, whichever way it goes, and none where nothing is dropped."""
    tensors = qkv()
    found = []
    for forgets in (False, True):
        torch.manual_seed(5)
        outs = []
        for _ in range(4):
            if forgets:
                call.plans.clear()
            outs.append(attention(*tensors, dropout_p=0.5))
            attention(*tensors, dropout_p=0.0)
        found.append((*outs, torch.get_rng_state()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][0], found[0][1])
    assert kernels.checked == 2 + 8


def test_a_retried_call_draws_one_seed(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a checkpoint, which calls again with the same state of the generator, drops the same."""
    tensors = qkv()
    attention(*tensors, dropout_p=0.5)
    torch.manual_seed(5)
    expected = attention(*tensors, dropout_p=0.5)
    state = torch.get_rng_state()
    failures = [RuntimeError("out of memory, this once")]

    def fails_once(arguments: Any) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(kernel_stand_ins, "refuse", fails_once)
    torch.manual_seed(5)
    assert torch.equal(attention(*tensors, dropout_p=0.5), expected)
    assert not failures
    assert torch.equal(torch.get_rng_state(), state)


def test_keys_hold_the_share_of_dropout_and_no_seed(kernels: Kernels) -> None:
    """True is no 1, though it equals 1; nothing is dropped at 0, by the brief op."""
    tensors = qkv()
    for count, p in enumerate((0.25, 0.5, 1, 1.0), 1):
        for seed in range(3):
            out = attention(*tensors, dropout_p=p, dropout_seed=seed)
            expected = attention_reference(*tensors, dropout_p=p, dropout_seed=seed)
            assert_close(out, expected, "rounding")
        assert kernels.checked == count
    assert len(call.plans) == 4
    for p in (0, 0.0, -0.0):
        kernels.ran.clear()
        for _ in range(3):
            out = attention(*tensors, dropout_p=p)
            assert_close(out, attention_reference(*tensors), "rounding")
        assert kernels.ran[1:] == ["brief_forward.output"] * 2
    for _ in range(2):
        for wrong, error, message in (
            (True, TypeError, "dropout_p is a bool"),
            (False, TypeError, "dropout_p is a bool"),
            ("0.5", TypeError, "dropout_p is a str"),
            (torch.tensor(0.5), TypeError, "dropout_p is a torch.Tensor"),
            (1.5, ValueError, "dropout_p is 1.5"),
            (-0.5, ValueError, "dropout_p is -0.5"),
            (float("nan"), ValueError, "dropout_p is nan"),
        ):
            with pytest.raises(error, match=f"attention: {message}, expected"):
                attention(*tensors, dropout_p=wrong)  # type: ignore[arg-type]
    before = kernels.checked
    for _ in range(2):
        out = attention(*tensors, dropout_p=np.float64(0.5), dropout_seed=3)
        assert torch.equal(out, attention(*tensors, dropout_p=0.5, dropout_seed=3))
    assert kernels.checked == before + 2


def test_slopes_that_require_a_gradient_are_refused(kernels: Kernels) -> None:
    tensors, slopes = qkv(), torch.rand(4)
    attention(*tensors, alibi_slopes=slopes)
    learned = torch.nn.Parameter(slopes)
    for _ in range(2):
        for wrong in (learned, slopes.clone().requires_grad_()):
            with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
                attention(*tensors, alibi_slopes=wrong)
    before = kernels.checked
    with torch.no_grad():  # where nobody waits for a gradient
        out = attention(*tensors, alibi_slopes=learned)
    assert torch.equal(out, attention(*tensors, alibi_slopes=slopes))
    assert kernels.checked == before


class Subclass(Tensor):
    """A tensor of another type, as libraries have them."""


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes has shape \[3\], expected"),
    ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes has shape \[3, 4\]"),
    ({"alibi_slopes": torch.ones(4).double()}, TypeError, "alibi_slopes has dtype torch.float64"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes is a list"),
    ({"alibi_slopes": True}, TypeError, "alibi_slopes is a bool"),
    ({"bias": torch.ones(5, 6)}, ValueError, r"bias has shape \[5, 6\], expected"),
    ({"bias": torch.ones(3, 1, 5, 7)}, ValueError, r"bias has shape \[3, 1, 5, 7\]"),
    ({"bias": torch.ones(1, 2, 4, 5, 7)}, ValueError, r"bias has shape \[1, 2, 4, 5, 7\]"),
    ({"bias": torch.ones(5, 7).half()}, TypeError, "bias has dtype torch.float16"),
    ({"bias": torch.ones(5, 7) > 0}, TypeError, "a mask becomes a bias with"),
    ({"bias": 1.0}, TypeError, "bias is a float"),
    ({"dropout_p": 0.5, "dropout_seed": True}, TypeError, "dropout_seed is a bool"),
    ({"dropout_p": 0.5, "dropout_seed": 1.0}, TypeError, "dropout_seed is a float"),
    ({"dropout_p": 0.5, "dropout_seed": torch.ones(1)}, TypeError, "dropout_seed has dtype"),
    ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}, ValueError, "dropout_seed has sh"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_the_op_refuses_is_said_in_our_words(
    kernels: Kernels, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = {
        "alibi_slopes": {"alibi_slopes": torch.ones(4)},
        "bias": {"bias": torch.ones(5, 7)},
        "dropout_p": {"dropout_p": 0.5, "dropout_seed": 3},
    }[next(iter(options))]
    for grad in (False, True):
        tensors = [t.requires_grad_(grad) for t in qkv()]
        attention(*tensors, **right)
        for _ in range(2):
            with pytest.raises(error, match=f"^attention: .*{message}"):
                attention(*tensors, **options)
    assert len(call.plans) == 1


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "dropout_seed"])
def test_subclasses_among_the_extras_go_the_long_way(kernels: Kernels, name: str) -> None:
    options = KINDS["all"](1) | {"dropout_seed": torch.tensor([5])}
    expected = attention(*qkv(), **options)
    options[name] = options[name].as_subclass(Subclass)
    for count in (2, 3):
        for one, other in zip(attention(*qkv(), **options), expected, strict=True):
            assert torch.equal(one, other)
        assert kernels.checked == count


def test_autocast_casts_a_bias_on_the_short_way(kernels: Kernels) -> None:
    tensors = qkv()
    for turn in range(3):
        bias = torch.randn(1, 4, 5, 7, requires_grad=True)
        grads = []
        for backend in ("auto", "reference"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = attention(*tensors, bias=bias, backend=backend)
            assert out.dtype == torch.bfloat16
            grads.append((out, *torch.autograd.grad(out.float().sum(), bias)))
        assert grads[0][1].dtype == torch.float32
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)
        assert kernels.checked == 1 + turn + 1
