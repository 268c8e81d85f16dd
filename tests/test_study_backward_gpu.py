"""Backward kernels with columns for study, on a GPU: their gradients are right by the float64 rule
where their choices matter: at every number of steps and blocks, where steps are divided, where a
kernel writes dQ itself, with NaN behind sequences, in large grids, in a fixed order.

CUTE_ATTENTION_BUILT names a folder with their libraries, as in test_rows_gpu.py, which checks the
same kernels in ordinary calls.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import kernel_cache
from cute_attention.rows import Kernel, load_library, use
from cute_attention.semantics.formula import attention_reference
from kernel_calls import plain_pytorch
from test_rows_gpu import BUILT, kernel_called, skip_unless_it_runs_here
from test_study_gpu import tensors
from tolerances import assert_as_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not BUILT, reason="CUTE_ATTENTION_BUILT names no folder with libraries"),
]

BACKWARD = [path for path in BUILT if "_bwd_" in path.name]


@pytest.fixture(params=BACKWARD, ids=lambda path: path.stem)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """A kernel that this GPU runs."""
    load_library(request.param, on_request=True)
    found = kernel_called(request.param.stem.removeprefix(kernel_cache.PLUG_IN))
    skip_unless_it_runs_here(found)
    if found.score_mods:
        pytest.skip("its calls need arguments of their own")
    return found


def leaves(*given: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in given]


def gradients(kernel: Kernel, inputs: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    own = leaves(*inputs)
    with use(kernel):
        out = attention(*own, **options)
    return list(torch.autograd.grad(out, own, grad))


def assert_right(
    found: list[Tensor], inputs: list[Tensor], grad: Tensor, name: str, **options: Any
) -> None:
    """Gradients by the float64 rule. Every query sees a key: where one does not, those of plain
    PyTorch are NaN, and allow anything."""
    exact_inputs = leaves(*(tensor.double() for tensor in inputs))
    exact_out = attention_reference(*exact_inputs, **options)
    assert isinstance(exact_out, Tensor)
    exact = torch.autograd.grad(exact_out, exact_inputs, grad.double())
    plain_inputs = leaves(*inputs)
    plain_out, _ = plain_pytorch(*plain_inputs, options)
    plain = torch.autograd.grad(plain_out, plain_inputs, grad)
    for letter, ours, right, theirs in zip("qkv", found, exact, plain, strict=True):
        assert_as_accurate(ours, right, theirs, f"d{letter} of {name}")


def check(
    kernel: Kernel, inputs: tuple[Tensor, ...], name: str, fixed_order: bool = False, **options: Any
) -> None:
    q, _, v = inputs
    grad = torch.randn(*q.shape[:3], v.shape[-1], device="cuda", dtype=q.dtype)
    found = gradients(kernel, [*inputs], grad, deterministic=fixed_order, **options)
    assert_right(found, [*inputs], grad, name, **options)
    if fixed_order:
        again = gradients(kernel, [*inputs], grad, deterministic=True, **options)
        for letter, first, second in zip("qkv", found, again, strict=True):
            assert torch.equal(first, second), f"d{letter} of {name} has other bits"


def test_every_number_of_steps_and_blocks(kernel: Kernel) -> None:
    """One to four tiles of queries and of keys: whole ones, and the last with one row."""
    for tiles_m, tiles_n in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        for rest in (0, 1):
            queries = tiles_m * kernel.tile_m - rest * (kernel.tile_m - 1)
            keys = tiles_n * kernel.tile_n - rest * (kernel.tile_n - 1)
            inputs = tensors(kernel, 2, queries, keys)
            check(kernel, inputs, f"{queries} x {keys}")
            inputs = tensors(kernel, 2, queries, max(queries, keys))
            check(kernel, inputs, f"{queries} x {keys} causal", causal=True)


def test_a_window_hides_steps_at_both_ends(kernel: Kernel) -> None:
    keys = 5 * max(kernel.tile_m, kernel.tile_n) + 7
    inputs = tensors(kernel, 1, 5 * kernel.tile_m + 3, keys)
    for window in ((kernel.tile_n + 5, 7), (3, 2 * kernel.tile_n), (0, 0)):
        check(kernel, inputs, f"window {window}", window=window)


def test_steps_that_are_divided_among_ctas(kernel: Kernel) -> None:
    """Few blocks of keys and many steps: parts of a block add to dK and dV."""
    check(kernel, tensors(kernel, 1, 2048, kernel.tile_n + 3), "parts")
    check(kernel, tensors(kernel, 1, 2048, 2048), "parts, causal", causal=True)


def test_more_blocks_than_multiprocessors(kernel: Kernel) -> None:
    """Every CTA of a persistent grid computes several blocks, every other CTA one."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    batch = -(-(3 * count + 1) // 4)
    queries = 2 * kernel.tile_m - 1
    inputs = tensors(kernel, batch, queries, max(queries, kernel.tile_n + 1), heads=4)
    check(kernel, inputs, "full")
    check(kernel, inputs, "causal", causal=True)


def test_heads_in_several_groups(kernel: Kernel) -> None:
    """More heads than L2 holds are taken in groups (core/grad_tile.h): 103 KV heads, so that the
    last group is smaller, more and fewer blocks of keys than tiles of queries, and blocks of keys
    that no query sees."""
    for queries, keys in ((700, 700), (700, 333), (650, 900)):
        inputs = tensors(kernel, 1, queries, keys, heads=206)
        check(kernel, inputs, f"{queries} x {keys}")
        if keys >= queries:
            check(kernel, inputs, f"{queries} x {keys} causal", causal=True)
            check(kernel, inputs, f"{queries} x {keys} in order", fixed_order=True, causal=True)
    inputs = tensors(kernel, 3, 700, 1100, heads=80)  # the first query is opposite key 400
    check(kernel, inputs, "window", window=(90, 0))


def test_a_fixed_order_has_the_same_bits(kernel: Kernel) -> None:
    queries = 4 * kernel.tile_m + 5
    inputs = tensors(kernel, 8, queries, max(queries, 6 * kernel.tile_n + 3), heads=8)
    for causal in (False, True):
        check(kernel, inputs, f"{causal=}", fixed_order=True, causal=causal)


def test_no_keys_and_no_queries(kernel: Kernel) -> None:
    q, k, v = tensors(kernel, 2, 5, 0)
    grad = torch.randn(2, 5, 2, kernel.head_dim_v, device="cuda", dtype=q.dtype)
    dq, dk, dv = gradients(kernel, [q, k, v], grad)
    assert (dq == 0).all() and dk.numel() == dv.numel() == 0
    q, k, v = tensors(kernel, 2, 0, 5)
    dq, dk, dv = gradients(kernel, [q, k, v], grad[:, :0])
    assert dq.numel() == 0 and (dk == 0).all() and (dv == 0).all()


def test_packed_sequences_with_nan_behind_them(kernel: Kernel) -> None:
    """The rows behind a sequence are those of the next one, which are NaN in one of two cases."""
    queries = (70, 0, 2 * kernel.tile_m + 3, 1, 40)
    keys = (2 * kernel.tile_n + 1, 4, kernel.tile_n - 2, 3 * kernel.tile_n - 1, 0)
    q, k, v = (t[0] for t in tensors(kernel, 1, sum(queries), sum(keys)))
    grad = torch.randn(*q.shape[:2], v.shape[-1], device="cuda", dtype=q.dtype)
    starts = [(0, *itertools.accumulate(counts)) for counts in (queries, keys)]
    cu_q, cu_k = (torch.tensor(each, device="cuda", dtype=torch.int32) for each in starts)
    for poisoned, causal in itertools.product((False, True), (False, True)):
        if poisoned:  # every other sequence
            for i in (1, 3):
                k[starts[1][i] : starts[1][i + 1]] = math.nan
                v[starts[1][i] : starts[1][i + 1]] = math.nan
        own = leaves(q, k, v)
        with use(kernel):
            out = attention_varlen(*own, cu_q, cu_k, max(queries), max(keys), causal=causal)
        dq, dk, dv = torch.autograd.grad(out, own, grad)
        for i in range(len(queries)):
            if (poisoned and i in (1, 3)) or (causal and 0 < keys[i] < queries[i]):
                continue
            mine, theirs = (slice(start[i], start[i + 1]) for start in starts)
            if queries[i] == 0:
                assert (dk[theirs] == 0).all() and (dv[theirs] == 0).all()
            elif keys[i] == 0:
                assert (dq[mine] == 0).all()
            else:
                parts = [q[mine][None], k[theirs][None], v[theirs][None]]
                found = [dq[mine][None], dk[theirs][None], dv[theirs][None]]
                name = f"sequence {i}, {poisoned=}, {causal=}"
                assert_right(found, parts, grad[mine][None], name, causal=causal)


def test_a_graph_on_another_stream(kernel: Kernel) -> None:
    """In a fixed order, so that the bits are the same."""
    inputs = tensors(kernel, 2, 3 * kernel.tile_m + 1, 2 * kernel.tile_n + 1)
    q, _, v = inputs
    grad = torch.randn(*q.shape[:3], v.shape[-1], device="cuda", dtype=q.dtype)
    own = leaves(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), use(kernel):
        for _ in range(2):
            out = attention(*own, deterministic=True)
            expected = torch.autograd.grad(out, own, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), use(kernel):
        out = attention(*own, deterministic=True)
        captured = torch.autograd.grad(out, own, grad)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for letter, mine, right in zip("qkv", captured, expected, strict=True):
        assert torch.equal(mine, right), f"d{letter}"
