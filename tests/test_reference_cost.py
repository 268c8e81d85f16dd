"""What the blockwise backend costs: memory linear in the sequence length, time near PyTorch's
unfused attention."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_attention.arguments import Arguments
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward

# Peak of the process over what it held before the call, so whatever is allocated counts, and a
# smaller peak before the call cannot hide anything. (ru_maxrss would count the parent's peak too.)
MEASURE_MEMORY = """
import sys
import torch
from cute_attention.arguments import Arguments
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward

def megabytes(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6

def attend(seqlen, causal):
    q, k, v, grad = torch.randn(4, 1, seqlen, 1, 64).unbind(0)
    before = megabytes("VmRSS")
    call = Arguments(q, k, v, "reference", 0.125, window_right=0 if causal else -1)
    out, lse = blockwise_forward(call)
    blockwise_backward(grad, None, out, lse, call)
    return megabytes("VmHWM") - before

attend(256, True)
print(attend(int(sys.argv[1]), sys.argv[2] == "causal"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_memory_at_16384(mask: str) -> None:
    """Forward plus backward under 200 MB above the inputs; the scores alone would be 1 GB."""
    command = [sys.executable, "-c", MEASURE_MEMORY, "16384", mask]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used = float(done.stdout)
    print(f"{mask}: {used:.0f} MB above the inputs")
    assert 10 < used < 200


def fastest(call: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_times(causal: bool, repeats: int = 3) -> dict[str, tuple[float, float]]:
    """Seconds of (blockwise, PyTorch's math attention) at batch 1, 2048 tokens, 8 heads of 64."""
    q, k, v, grad = torch.randn(4, 1, 2048, 8, 64).unbind(0)
    call = Arguments(q, k, v, "reference", 0.125, window_right=0 if causal else -1)

    def blockwise_both() -> None:
        out, lse = blockwise_forward(call)
        blockwise_backward(grad, None, out, lse, call)

    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]

    def math() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*leaves, is_causal=causal)

    def math_forward() -> None:
        with torch.no_grad():
            math()

    def math_both() -> None:
        torch.autograd.grad(math(), leaves, grad.transpose(1, 2))

    return {
        "forward": (
            fastest(lambda: blockwise_forward(call), repeats),
            fastest(math_forward, repeats),
        ),
        "forward and backward": (fastest(blockwise_both, repeats), fastest(math_both, repeats)),
    }


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_time_is_near_that_of_math_attention(causal: bool) -> None:
    """The aim is a factor of 2; 4 is asserted, for machines that do something else meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (ours, pytorch) in measure_times(causal).items():
            print(f"{name}: {ours * 1e3:.0f} ms, PyTorch {pytorch * 1e3:.0f} ms")
            assert ours < 4 * pytorch, name
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    """Print the table with PyTorch's default number of threads: `python
    tests/test_reference_cost.py`."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for causal in (False, True):
        for name, (ours, pytorch) in measure_times(causal, repeats=10).items():
            mask = "causal" if causal else "full"
            print(
                f"{mask:6} {name:20} blockwise {ours * 1e3:5.0f} ms  "
                f"math {pytorch * 1e3:5.0f} ms  ratio {ours / pytorch:.2f}"
            )


if __name__ == "__main__":
    main()
