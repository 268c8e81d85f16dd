"""torch.export, make_fx, and graphs with lengths that only their run knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from cute_attention import attention, attention_varlen, use_backend
from tolerances import assert_close


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with use_backend("reference"):
        yield


def dense(seqlen_q: int = 9, seqlen_k: int = 13) -> list[Tensor]:
    torch.manual_seed(seqlen_q)
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 24))
    return [torch.randn(shape) for shape in shapes]


def packed(*lengths: int) -> list[Tensor]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (t[0] for t in dense(sum(lengths), sum(lengths)))
    return [q, k, v, ends]


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """A window whose sides depend on the shapes."""
    window = (k.shape[1] // 2, q.shape[1] // 3)
    return attention(q, k, v, window=window, return_lse=True)


def by_shape(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
    """A max_seqlen that depends on the shapes."""
    return attention_varlen(
        q, k, v, ends, ends, q.shape[0], k.shape[0], causal=True, return_lse=True
    )


def by_value(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
    """A max_seqlen that is read from the lengths. No shape determines it, so it is an unbacked
    symbol."""
    longest = ends.diff().max().item()
    return attention_varlen(q, k, v, ends, ends, longest, longest, causal=True, return_lse=True)


def by_value_with_bias(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, bias: Tensor) -> Any:
    longest = ends.diff().max().item()
    return attention_varlen(q, k, v, ends, ends, longest, longest, bias=bias, return_lse=True)


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


ROWS, KEYS, ENDS = Dim("rows"), Dim("keys"), Dim("ends", min=3)
CALLS: dict[str, tuple[Callable[..., Any], list[Any], list[Any], tuple[Any, ...]]] = {
    "windowed": (windowed, dense(), dense(20, 31), ({1: ROWS}, {1: KEYS}, {1: KEYS})),
    "by shape": (by_shape, packed(5, 0, 8), packed(7, 3, 1, 12),
                 ({0: ROWS}, {0: KEYS}, {0: KEYS}, {0: ENDS})),
    "by value": (by_value, packed(5, 0, 8), packed(7, 3, 1, 12),
                 ({0: ROWS}, {0: KEYS}, {0: KEYS}, {0: ENDS})),
    "by value with bias": (by_value_with_bias, [*packed(5, 0, 8), torch.randn(4, 8, 8)],
                           [*packed(8, 1, 4), torch.randn(4, 8, 8)], (None,) * 5),
}  # fmt: skip


def assert_same(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "rounding")


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("name", CALLS)
def test_export(name: str, strict: bool) -> None:
    """The exported program also serves shapes and lengths with which it was not made."""
    function, example, other, shapes = CALLS[name]
    program = torch.export.export(
        Module(function), tuple(example), dynamic_shapes={"args": shapes}, strict=strict
    ).module()
    for arguments in (example, other):
        assert_same(program(*arguments), function(*arguments))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["windowed", "by shape"])
def test_make_fx(name: str, mode: str) -> None:
    """Forward and backward are in one graph. If it was made with symbolic shapes, it serves other
    shapes too."""
    function, example, other, _ = CALLS[name]

    def run(*arguments: Tensor) -> list[Tensor]:
        q, *rest = arguments
        q = q.detach().requires_grad_()
        out, lse = function(q, *rest)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out.sum() + lse.sum(), q)]

    graph = make_fx(run, tracing_mode=mode)(*example)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "cute_attention.reference_forward.default" in targets
    assert "cute_attention.reference_backward.default" in targets
    for arguments in (example, other) if mode == "symbolic" else (example,):
        assert_same(graph(*arguments), run(*arguments))


def test_an_exported_program_checks_its_lengths() -> None:
    """What cannot be checked while a branch is traced is checked when the graph runs."""
    function, example, _, shapes = CALLS["by shape"]
    program = torch.export.export(
        Module(function), tuple(example), dynamic_shapes={"args": shapes}
    ).module()
    q, k, v, ends = packed(5, 0, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q ends with 13, expected at most 12"):
        program(q[:12], k, v, ends)


@pytest.mark.parametrize("name", ["by value", "by value with bias"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_with_lengths_that_only_the_run_knows(name: str) -> None:
    function, example, other, _ = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for arguments in (example, other):
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in arguments]
        results = []
        for run in (compiled, function):
            out, lse = run(*leaves)
            grads = torch.autograd.grad(
                out.square().sum() + lse.sum(), [t for t in leaves if t.requires_grad]
            )
            results.append([out, lse, *grads])
        assert_same(*results)
