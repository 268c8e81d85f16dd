"""The ops exist once the package is imported: exported programs, checkpoint policies, modes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cute_attention import attention

OPS = torch.ops.cute_attention


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Any:
        out, lse = attention(q, k, k, causal=True, softcap=2.0, return_lse=True)
        return out, lse, attention(q, k, k)


def test_an_exported_program_is_loaded_by_another_process(tmp_path: Path) -> None:
    """An exported program runs in a process that imports the package and calls nothing else of
    it."""
    torch.manual_seed(0)
    inputs = torch.randn(1, 5, 4, 16), torch.randn(1, 7, 2, 16)
    torch.export.save(torch.export.export(Module(), inputs), tmp_path / "program.pt2")
    torch.save(inputs, tmp_path / "inputs.pt")
    code = f"""
import torch, cute_attention
program = torch.export.load({str(tmp_path / "program.pt2")!r})
inputs = torch.load({str(tmp_path / "inputs.pt")!r})
torch.save(program.module()(*inputs), {str(tmp_path / "results.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "results.pt")
    for actual, expected in zip(found, Module()(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "recomputed"])
def test_a_checkpoint_policy_names_the_op(saves: bool) -> None:
    """The backward does not compute again what the policy saves."""
    seen: list[bool] = []
    op = OPS.reference_forward.default

    def policy(context: Any, op_called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op_called is not op:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counted.calls += func is op
            return func(*args, **(kwargs or {}))

    def run(q: Tensor) -> Tensor:
        return attention(2 * q, q, q, causal=True).sin()

    q = torch.randn(1, 5, 4, 16, requires_grad=True)
    with Counted():
        out = checkpoint(
            run, q, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.sum(), q)
    assert seen and not seen[0]
    assert Counted.calls == (1 if saves else 2)
    torch.testing.assert_close(grad, torch.autograd.grad(run(q).sum(), q)[0])


def test_the_lse_is_computed_where_it_is_used_alone() -> None:
    """`forward` for gradients and for return_lse, the overload `output` otherwise."""
    seen = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 5, 4, 16)
    leaf = q.clone().requires_grad_()
    with Names():
        attention(q, q, q)
        attention(q, q, q, return_lse=True)
        attention(leaf, q, q)
        with torch.no_grad():
            attention(leaf, q, q)
    names = [op for op in seen if "cute_attention" in str(op)]
    forward, output = OPS.reference_forward.default, OPS.reference_forward.output
    assert names == [output, forward, forward, output]
