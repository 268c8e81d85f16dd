"""The blockwise backend and dropout's bits on a GPU: the same meaning, no waiting for the
device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_attention.blockwise import blockwise_backward, blockwise_forward
from cute_attention.dropout import as_seed, random_bytes
from reference_cases import (
    CASES,
    SEED,
    Case,
    Inputs,
    make_grads,
    make_inputs,
    make_spec,
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
    """`run_blockwise` with the tensors of the CPU run on the GPU, and its results back."""
    moved = to_cuda(inputs)
    rest = (None, None, moved.bias, moved.alibi_slopes, moved.sink, SEED.cuda(), make_spec(case))
    qkv = (moved.q, moved.k, moved.v)
    out, lse = blockwise_forward(*qkv, *rest)
    grads = (grad.cuda() for grad in make_grads(out.cpu(), lse.cpu()))
    needs = (moved.bias is not None, moved.sink is not None)
    results = (out, lse, *blockwise_backward(*grads, *qkv, out, lse, *rest, *needs))
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
    """Nothing waits for the device, and a new seed in the same memory draws new bits on replay."""
    case = dataclasses.replace(CASES[-1], seqlen_q=300, seqlen_k=400)
    inputs = to_cuda(make_inputs(case).to(torch.float32))
    seed = SEED.cuda()
    rest = (None, None, inputs.bias, inputs.alibi_slopes, inputs.sink, seed, make_spec(case))
    qkv = (inputs.q, inputs.k, inputs.v)

    def both() -> tuple[torch.Tensor, ...]:
        out, lse = blockwise_forward(*qkv, *rest)
        return (out, lse, *blockwise_backward(out, lse, *qkv, out, lse, *rest, True, True))

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
    rest = (None, None, inputs.bias, inputs.alibi_slopes, inputs.sink, SEED.cuda(), make_spec(case))
    qkv = (inputs.q, inputs.k, inputs.v)
    blockwise_forward(*qkv, *rest)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = blockwise_forward(*qkv, *rest)
        blockwise_backward(out, lse, *qkv, out, lse, *rest, True, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_at_16384() -> None:
    """Forward plus backward under 200 MB above the inputs."""
    q, k, v, grad = torch.randn(4, 1, 16384, 1, 64, device="cuda").unbind(0)
    case = Case("long", seqlen_q=16384, seqlen_k=16384, head_dim=64)
    rest = (None, None, None, None, None, None, make_spec(case))
    blockwise_forward(q[:, :64], k, v, *rest)  # cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = blockwise_forward(q, k, v, *rest)
    blockwise_backward(grad, None, q, k, v, out, lse, *rest)
    used = (torch.cuda.max_memory_allocated() - before) / 1e6
    print(f"{used:.0f} MB above the inputs")
    assert used < 200
