"""The brief ops on a GPU: they give the bits of the full ops, and refuse texts that say nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, explain

pytestmark = pytest.mark.gpu

OPS = torch.ops.cute_attention

# (scale, window_left, window_right, softcap)
OPTIONS = [(0.125, -1, -1, 0.0), (1 / 3, -1, 0, 0.0), (1e-3, 17, 5, 0.0), (0.125, -1, 0, 7.5)]


def tensors(packed: bool) -> list[Tensor]:
    """Views with other strides than those of their shapes."""
    torch.manual_seed(0)
    rows = (330,) if packed else (2, 165)
    shapes = ((*rows, 8, 64), (*rows, 2, 64), (*rows, 2, 64))
    wide = [torch.randn(*s[:-1], 128, device="cuda").to(torch.bfloat16) for s in shapes]
    return [t[..., :64] for t in wide]


def packing(packed: bool) -> tuple[Any, ...]:
    if not packed:
        return ()
    offsets = torch.tensor([0, 100, 100, 301], dtype=torch.int32, device="cuda")
    return offsets, offsets, 201, 201


def chosen(softcap: float) -> tuple[str, str]:
    q, k, v = tensors(packed=False)
    answer = explain(q, k, v, softcap=softcap)
    if "reference" in (answer.chosen, answer.chosen_backward):
        pytest.skip("no kernel serves this GPU")
    return answer.chosen, answer.chosen_backward


def assert_same_bits(brief: Any, full: Any) -> None:
    for one, other in zip(brief, full, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_the_full_ops(packed: bool, options: tuple[Any, ...]) -> None:
    forward, backward = chosen(options[-1])
    inputs, extras = tensors(packed), packing(packed)
    prefix = "brief_packed_" if packed else "brief_"
    text = " ".join(map(str, (forward, *options)))
    brief, full = getattr(OPS, f"{prefix}forward"), OPS.forward
    out, lse = full(*inputs, forward, *options, *extras)
    assert_same_bits(brief(*inputs, text, *extras), (out, lse))
    assert torch.equal(brief.output(*inputs, text, *extras), out)
    text = " ".join(map(str, (backward, *options)))
    for grad_lse in (None, torch.randn_like(lse)):
        results = (torch.randn_like(out), grad_lse, out, lse, True)
        grads = OPS.backward(*results, *inputs, backward, *options, *extras)
        found = getattr(OPS, f"{prefix}backward")(*results, *inputs, text, *extras)
        assert_same_bits(found, grads[:3])


WRONG = [
    "", "sm90", "sm90 0.125 -1 -1", "sm90 0.125 -1 -1 0.0 0", "sm90 x -1 -1 0.0",
    "sm90 0.125 -1 -1 0.0x", "sm90 0.125 -1.5 -1 0.0", "sm70 0.125 -1 -1 0.0",
    "0.125 -1 -1 0.0 sm90",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_texts_are_refused(text: str) -> None:
    chosen(0.0)
    for _ in range(2):  # a refused text is not remembered as a good one
        with pytest.raises(RuntimeError, match=r"options are|backend is"):
            OPS.brief_forward(*tensors(packed=False), text)


@pytest.mark.parametrize("with_gradient", [False, True], ids=["fwd", "fwdbwd"])
def test_a_thread_that_has_not_used_cuda(with_gradient: bool) -> None:
    """CUDA has no current context there, and no call of PyTorch makes one: its memory is at hand
    from the calls before. Autograd runs the backward in a thread of that kind, too."""
    chosen(0.0)
    inputs = [t.detach().requires_grad_(with_gradient) for t in tensors(packed=False)]
    kept: list[Any] = []

    def run() -> None:
        out = attention(*inputs, causal=True)
        if with_gradient:
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
            kept.append((out, *grads))
        else:
            kept.append((out,))

    for _ in range(2):
        run()
    kept_here = kept.pop()
    kept.clear()
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(kept) == 3
    for results in kept:
        assert torch.equal(results[0], kept_here[0])
        for one, other in zip(results[1:], kept_here[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-2)
