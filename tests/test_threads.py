"""Calls from many threads at once, the first ones above all; forked and spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cute_attention import attention, explain

# Every thread loads the binding, calls forward and backward, and asks `explain`; some ask `info`.
MANY_THREADS = """
import sys, threading, warnings
import torch
from cute_attention import attention, explain
from cute_attention.cli.info import info
from cute_attention.native.binding import binding_error

warnings.simplefilter("ignore")
device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.manual_seed(0)
inputs = torch.randn(3, 2, 40, 4, 64).to(device, dtype).unbind()
together = threading.Barrier(64)
results, errors = [], []

def call(index):
    try:
        together.wait()
        loaded = binding_error()
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = attention(*leaves, causal=True, deterministic=True)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        text = str(explain(*leaves, causal=True))
        if index % 16 == 0:
            assert any("torch binding" in line for line in info())
        results.append(([out, *grads], text, loaded))
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=call, args=(index,)) for index in range(64)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(results) == 64
for tensors, text, loaded in results:
    for one, other in zip(tensors, results[0][0], strict=True):
        torch.testing.assert_close(one, other)
    assert (text, loaded) == results[0][1:]
print("done")
"""

# A thread holds the lock for ever; the child has no such thread, and loads the binding.
FORK_WHILE_LOADING = """
import os, threading
from cute_attention.native import binding

held = threading.Event()
def hold():
    with binding._lock:
        held.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    binding.binding_error()
    os._exit(0)
print(os.waitpid(child, 0)[1])
os._exit(0)
"""


def run_python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)],
)
def test_first_calls_of_64_threads(device: str, dtype: str) -> None:
    assert run_python(MANY_THREADS, device, dtype) == "done\n"


def test_a_fork_while_the_binding_is_loaded() -> None:
    assert run_python(FORK_WHILE_LOADING) == "0\n"


def work(seed: int) -> list[Tensor]:
    """Forward, backward and `explain`, in whatever process this is called."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(1, 9, 2, 8, generator=generator).requires_grad_() for _ in range(3)]
    out, lse = attention(*leaves, causal=True, return_lse=True)
    assert explain(*leaves, causal=True).chosen == "reference"
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.sum() + lse.sum(), leaves)]


# The program uses one thread, because the thread pools of PyTorch do not survive a fork.
FORK_AFTER_CALLS = """
import os, torch
torch.set_num_threads(1)
from test_threads import work
expected = work(1)
child = os.fork()
if child == 0:
    same = all(map(torch.equal, work(1), expected))
    os._exit(0 if same else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_after_calls() -> None:
    code = f"import sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n{FORK_AFTER_CALLS}"
    assert run_python(code) == "0\n"


def test_spawned_processes() -> None:
    expected = [work(seed) for seed in (1, 2)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map_async(work, (1, 2)).get(timeout=100)
    for actual, wanted in zip(results, expected, strict=True):
        for one, other in zip(actual, wanted, strict=True):
            assert torch.equal(one, other)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 1, 64)).unbind(-3)
        return attention(q, k, v, causal=True)


@pytest.mark.gpu
def test_data_parallel() -> None:
    """Replicas in threads, one for each GPU; with one GPU, two replicas on it."""
    torch.manual_seed(0)
    layer = Layer().to("cuda", torch.bfloat16)
    x = torch.randn(4, 50, 64, device="cuda", dtype=torch.bfloat16)
    expected = layer(x)
    expected.float().square().sum().backward()
    wanted = layer.project.weight.grad.clone()
    layer.zero_grad()
    if torch.cuda.device_count() > 1:
        out = torch.nn.DataParallel(layer)(x)
    else:
        halves = [(half,) for half in x.chunk(2)]
        out = torch.cat(torch.nn.parallel.parallel_apply([layer, layer], halves, devices=[0, 0]))
    out.float().square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.project.weight.grad, wanted, rtol=0.02, atol=0.1)
