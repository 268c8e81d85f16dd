"""Kernels are stood in for on the CPU by ops that refuse what the binding refuses, and otherwise do
what the reference does. So tests can see which way a call goes. `conftest.py` makes a fixture of
it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import call
from cute_attention.arguments import Arguments
from cute_attention.dispatch import select as selection
from cute_attention.ops.schema import spelled_out

OPS = torch.ops.cute_attention


def refuse(arguments: Arguments) -> None:
    """Checks tensors like the binding, in few words."""
    q, k, v = arguments[:3]
    same = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and q.dtype == k.dtype
    if not (same and q.dim() == k.dim() and (arguments.packed or q.shape[0] == k.shape[0])):
        raise RuntimeError("the shapes of q, k and v do not match")
    heads = q.shape[-2]
    if heads % k.shape[-2] != 0:
        raise RuntimeError("the heads of k must divide those of q")
    sink, slopes, bias = arguments.sink, arguments.alibi_slopes, arguments.bias
    if sink is not None and (sink.dtype != torch.float32 or sink.shape != (heads,)):
        raise RuntimeError("sink must be float32 [heads]")
    shapes = ((heads,), (arguments.batch, heads))
    if slopes is not None and (slopes.dtype != torch.float32 or slopes.shape not in shapes):
        raise RuntimeError("alibi_slopes must be float32 [heads] or [batch, heads]")
    if bias is not None and not fits(bias, arguments):
        raise RuntimeError("bias must broadcast to [batch, heads, seqlen_q, seqlen_k]")
    seed = arguments.dropout_seed
    if arguments.dropout_p > 0 and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise RuntimeError("dropout_seed must be an int64 of one element")


def fits(bias: Tensor, arguments: Arguments) -> bool:
    whole = arguments.batch, arguments.q.shape[-2], arguments.seqlen_q, arguments.seqlen_k
    return (
        bias.dtype in (arguments.q.dtype, torch.float32)
        and bias.dim() == 4
        and all(have in (1, want) for have, want in zip(bias.shape, whole, strict=True))
    )


class Kernels:
    """The ops that ran, by name."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.checked = 0  # calls whose arguments were checked: they found no plan

    def op(self, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ran.append(name)
            refuse(Arguments(*args[5:22]) if name == "backward" else Arguments(*args))
            return reference(*args)

        return run

    def brief(self, op: Callable[..., Any], kind: str, text_at: int) -> Callable[..., Any]:
        """The op with its options in a text."""
        of_text = spelled_out(op, text_at)

        def run(*args: Any) -> Any:
            results = of_text(*args)
            self.ran[-1] = kind + self.ran[-1]
            return results[:3] if isinstance(results, tuple) else results

        return run


@contextlib.contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Every call that is not asked to run on the reference runs on the stand-ins meanwhile."""
    stand_ins = Kernels()
    library = torch.library.Library("cute_attention", "IMPL")
    for name, reference, text_at in (
        ("forward", OPS.reference_forward.default, 3),
        ("forward.output", OPS.reference_forward.output, 3),
        ("backward", OPS.reference_backward.default, 8),
    ):
        op = stand_ins.op(name, reference)
        library.impl(name, op, "CPU")
        for kind in ("brief_", "brief_packed_"):
            library.impl(f"{kind}{name}", stand_ins.brief(op, kind, text_at), "CPU")
    monkeypatch.setattr(call, "plans", {})
    monkeypatch.setattr(selection, "_choices", {})

    def choose(problem: Any, requested: str) -> tuple[str, bool]:
        return ("reference" if requested == "reference" else "sm80"), True

    monkeypatch.setattr(selection, "_choose", choose)
    long_way = call._attend_checked

    def counted(*args: Any) -> Any:
        stand_ins.checked += 1
        return long_way(*args)

    monkeypatch.setattr(call, "_attend_checked", counted)
    monkeypatch.delenv("CUTE_ATTENTION_BACKEND", raising=False)
    try:
        yield stand_ins
    finally:
        library._destroy()


def qkv(seqlen_q: int = 5, seqlen_k: int = 7) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 24))
    return [torch.randn(shape) for shape in shapes]
