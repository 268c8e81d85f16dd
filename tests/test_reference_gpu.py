"""The blockwise backend and dropout's bits on a GPU: the same meaning, no waiting for the
device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_attention.arguments import Arguments
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward
from cute_attention.semantics.dropout import as_seed, random_bytes
from reference_cases import (
    CASES,
    SEED,
    Case,
    Inputs,
    make_call,
    make_grads,
    make_inputs,
    run_blockwise,
)
from tolerances import assert_close

pytestmark = pytest.mark.gpu


def to_cuda(inputs: Inputs) -> Inputs:
    moved = {
        field.name: None if tensor is None else tensor.detach().cuda()
        for field in dataclasses.fields(inputs)
        for tensor in [getattr(inputs, field.name)]
    }
    return Inputs(**moved)


def run_on_gpu(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Does what `run_blockwise` does, but on the GPU. Inputs and results are on the CPU."""
    moved = to_cuda(inputs)
    call = make_call(case, moved, seed=SEED.cuda())
    out, lse = blockwise_forward(call)
    grads = (grad.cuda() for grad in make_grads(out.cpu(), lse.cpu()))
    needs = (moved.bias is not None, moved.sink is not None)
    results = (out, lse, *blockwise_backward(*grads, out, lse, call, needs))
    names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
    return {n: t.cpu() for n, t in zip(names, results, strict=True) if t is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_equals_cpu(case: Case) -> None:
    inputs = make_inputs(case)
    expected = run_blockwise(case, inputs)
    for name, value in run_on_gpu(case, inputs).items():
        rule = "large_scores" if case.offset else "gradient"
        assert_close(value, expected[name], rule, name=name)


def test_dropout_bits_are_those_of_the_cpu() -> None:
    ranges = ((5, 9), (3, 200), (17, 333))
    for seed in (0, -1, 2**62 + 12345):
        on_cpu = random_bytes(as_seed(seed, "cpu"), *ranges)
        assert torch.equal(random_bytes(as_seed(seed, "cuda"), *ranges).cpu(), on_cpu)


def test_bitwise_repeatable() -> None:
    case = dataclasses.replace(CASES[-1], seqlen_q=700, seqlen_k=900, batch=3)
    inputs = make_inputs(case).to(torch.bfloat16)
    first, second = run_on_gpu(case, inputs), run_on_gpu(case, inputs)
    for name, value in second.items():
        assert_close(value, first[name], "exact", name=name)


def test_a_cuda_graph_captures_forward_and_backward() -> None:
    """No step waits for the device. If the memory of the seed gets a new seed, a replay draws new
    bits."""
    case = dataclasses.replace(CASES[-1], seqlen_q=300, seqlen_k=400)
    inputs = to_cuda(make_inputs(case).to(torch.float32))
    seed = SEED.cuda()
    call = make_call(case, inputs, seed=seed)

    def both() -> tuple[torch.Tensor, ...]:
        out, lse = blockwise_forward(call)
        return (out, lse, *blockwise_backward(out, lse, out, lse, call, (True, True)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    outs = []
    for value in (SEED.item(), 1234):
        seed.fill_(value)
        graph.replay()
        outs.append(captured[0].clone())
        for replayed, eager in zip(captured, both(), strict=True):
            assert_close(replayed, eager, "exact")
    assert not torch.equal(*outs)


def test_a_dense_call_never_waits() -> None:
    case = CASES[-1]
    inputs = to_cuda(make_inputs(case))
    call = make_call(case, inputs, seed=SEED.cuda())
    blockwise_forward(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = blockwise_forward(call)
        blockwise_backward(out, lse, out, lse, call, (True, True))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_at_16384() -> None:
    """Forward plus backward under 200 MB above the inputs."""
    q, k, v, grad = torch.randn(4, 1, 16384, 1, 64, device="cuda").unbind(0)
    call = Arguments(q, k, v, "reference", 0.125)
    blockwise_forward(call._replace(q=q[:, :64]))  # cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = blockwise_forward(call)
    blockwise_backward(grad, None, out, lse, call)
    used = (torch.cuda.max_memory_allocated() - before) / 1e6
    print(f"{used:.0f} MB above the inputs")
    assert used < 200
