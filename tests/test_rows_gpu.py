"""Kernels that calls ask for by name, on a GPU: the one that was asked for runs, also where another
would be chosen, and its results are right.

CUTE_ATTENTION_BUILT names a folder with libraries that `python -m cute_attention build --out` has
written: rows that are in no table; study_cases.py builds some with every column for study. They are
loaded on request alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_attention
from cute_attention import attention, explain
from cute_attention.inference import explain_with_cache
from cute_attention.native import kernel_cache, rows
from cute_attention.rows import BuildError, Kernel, load_library, use
from cute_attention.semantics.formula import attention_reference
from every_row import DTYPES, LIMIT, is_built
from kernel_calls import plain_pytorch
from latent_calls import latent_call, latent_form
from paged_calls import Call, Form
from paged_calls import check as check_paged
from shared_memory import reads_cache
from tolerances import assert_as_accurate

pytestmark = pytest.mark.gpu

BUILT = sorted(Path(os.environ.get("CUTE_ATTENTION_BUILT", "/nowhere")).glob("*.so"))
CACHED = [
    row.name
    for row in rows.table()
    if reads_cache(row) and {*row.score_mods} <= {"qv"} and row.head_dim >= 64
]
PLAIN = [row.name for row in rows.table() if not row.score_mods and row.head_dim >= 64]
HEAD_DIM = 64  # which all of these rows serve, and only some would be chosen for


def kernel_called(name: str) -> Kernel:
    return next(kernel for kernel in cute_attention.kernels() if kernel.name == name)


def skip_unless_it_runs_here(kernel: Kernel) -> None:
    if kernel.arch == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{kernel.name} needs a GPU of compute capability 9.0")
    properties = torch.cuda.get_device_properties(0)
    if kernel.shared_memory_bytes > properties.shared_memory_per_block_optin:
        pytest.skip(f"{kernel.name} needs more shared memory")


def check(kernel: Kernel) -> None:
    """Output and gradients of calls that ask for the kernel, against the formula in float64."""
    torch.manual_seed(0)
    dtype = DTYPES[kernel.dtype]
    for seqlen_q, seqlen_k, options in ((130, 517, {"causal": True}), (1, 300, {}), (257, 257, {})):
        q = torch.randn(2, seqlen_q, 4, HEAD_DIM, device="cuda", dtype=dtype)
        k, v = torch.randn(2, 2, seqlen_k, 2, HEAD_DIM, device="cuda", dtype=dtype).unbind()
        grad = torch.randn_like(q)
        exact_inputs = [t.double().requires_grad_() for t in (q, k, v)]
        exact = attention_reference(*exact_inputs, **options)
        exact_grads = torch.autograd.grad(exact, exact_inputs, grad.double())
        own_inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        plain = plain_pytorch(*own_inputs, options)[0]
        plain_grads = torch.autograd.grad(plain, own_inputs, grad)
        for _ in range(2):  # the second time from a plan
            asked = [t.clone().requires_grad_() for t in (q, k, v)]
            with use(kernel):
                out = attention(*asked, **options)
                answer = explain(*asked, **options)
            grads = torch.autograd.grad(out, asked, grad)
            assert_as_accurate(out.detach(), exact.detach(), plain.detach(), "out")
            for name, ours, right, theirs in zip(
                "qkv", grads, exact_grads, plain_grads, strict=True
            ):
                assert_as_accurate(ours, right, theirs, f"d{name}")
        forward = kernel.direction == "forward"
        reports = answer.forward if forward else answer.backward
        chosen = [row.name for report in reports for row in report.rows if row.chosen]
        assert chosen == [kernel.name]


def check_with_cache(kernel: Kernel) -> None:
    """Calls with a cache, which kernels with `qv` are for: contiguous, in pages, and in pages that
    no kernel reads, so that they are packed before."""
    dtype, lengths = DTYPES[kernel.dtype], (0, 5, 64, 333)
    has_qv = "qv" in kernel.score_mods
    plain = Form(dims=(HEAD_DIM, HEAD_DIM), queries=(3,) * 4, lengths=lengths, dtype=dtype)
    form = latent_form(3, 16, lengths=lengths, dtype=dtype) if has_qv else plain
    make = latent_call if has_qv else Call
    for page_size in (0, 64) if has_qv else (0, 64, 24):
        call = make(replace(form, page_size=page_size))
        with use(kernel):
            check_paged(call, kernel.arch)
            answer = explain_with_cache(**call.given)
        assert [row.name for report in answer.forward for row in report.rows] == [kernel.name]
        assert answer.chosen == kernel.arch


def kernels_of_a_call(like: Kernel, **options: Kernel) -> str:
    """The CUDA kernels that run in a call that the kernel serves, as the profiler names them."""
    x = torch.randn(1, 64, 2, HEAD_DIM, device="cuda", dtype=DTYPES[like.dtype])
    x.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention(x, x, x, **options).sum().backward()
        torch.cuda.synchronize()
    return "\n".join(event.key for event in profile.key_averages())


@pytest.mark.skipif(LIMIT in os.environ, reason="not for small chips")
@pytest.mark.parametrize("name", PLAIN)
def test_a_row_of_the_tables_serves_who_asks_for_it(name):
    row = next(row for row in rows.table() if row.name == name)
    if not is_built(row):
        pytest.skip(f"{name} is not built")
    kernel = kernel_called(name)
    skip_unless_it_runs_here(kernel)
    check(kernel)
    assert re.search(
        rf"rows::{name}\b|{len(name)}{name}E", kernels_of_a_call(kernel, kernel=kernel)
    )


@pytest.mark.skipif(LIMIT in os.environ, reason="not for small chips")
@pytest.mark.parametrize("name", CACHED)
def test_a_row_serves_who_asks_for_it_with_a_cache(name):
    row = next(row for row in rows.table() if row.name == name)
    if not is_built(row):
        pytest.skip(f"{name} is not built")
    kernel = kernel_called(name)
    skip_unless_it_runs_here(kernel)
    check_with_cache(kernel)


@pytest.mark.skipif(not BUILT, reason="CUTE_ATTENTION_BUILT names no folder with libraries")
@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_a_row_built_from_python_is_right(path):
    try:
        load_library(path, on_request=True)  # another test of this process may have loaded it
    except BuildError as error:
        pytest.fail(str(error))
    kernel = kernel_called(path.stem.removeprefix(kernel_cache.PLUG_IN))
    assert kernel.on_request
    skip_unless_it_runs_here(kernel)
    if kernel.head_dim < HEAD_DIM:
        pytest.skip(f"{kernel.name} serves smaller head dims")
    if kernel.direction == "forward":
        check_with_cache(kernel)
    if "qv" in kernel.score_mods:
        return  # no other calls have it
    check(kernel)
    assert kernel.name in kernels_of_a_call(kernel, kernel=kernel)
    assert kernel.name not in kernels_of_a_call(kernel)
