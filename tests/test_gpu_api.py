"""The public functions on a GPU: choice, gradients, streams, devices, CUDA graphs, cost."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import (
    FallbackWarning,
    attention,
    attention_reference,
    attention_varlen,
    attention_varlen_reference,
    call,
    explain,
    kernels,
)
from cute_attention.dispatch import select as selection
from cute_attention.inference import attention_with_cache
from kernel_calls import capture
from tolerances import assert_as_accurate, assert_close

pytestmark = pytest.mark.gpu

BACKENDS = ("sm90", "sm80", "reference")


def qkv(
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seqlen: int = 200, dim: int = 64
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, seqlen, 8, dim), (2, seqlen, 2, dim), (2, seqlen, 2, dim))
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def serving(*tensors: Any, **options: Any) -> list[str]:
    return [report.backend for report in explain(*tensors, **options).forward if report.serves]


@pytest.fixture(params=BACKENDS)
def served(request: pytest.FixtureRequest) -> str:
    """Every backend that serves causal bf16 of head dim 64 on this GPU."""
    if request.param not in serving(*qkv(), causal=True):
        pytest.skip(f"{request.param} has no kernel for this GPU")
    return request.param


def test_auto_takes_the_fastest_that_serves() -> None:
    tensors = qkv()
    answer = explain(*tensors, causal=True)
    assert answer.chosen == serving(*tensors, causal=True)[0]
    if any(row.name == "sm80_fwd_bf16_d64" for row in kernels()):
        assert answer.chosen in ("sm90", "sm80")
    fastest = attention(*tensors, causal=True, backend=answer.chosen)
    assert torch.equal(attention(*tensors, causal=True), fastest)


def test_falling_back_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_choices", {})
    monkeypatch.setattr(call, "plans", {})
    monkeypatch.setattr(selection, "_warned", {})
    tensors = qkv(torch.float32)
    with pytest.warns(FallbackWarning, match="no kernel serves this call") as caught:
        out = attention(*tensors)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attention(*tensors), out)


def test_accuracy(served: str) -> None:
    """Output, LSE and gradients against float64, and against plain PyTorch in bfloat16."""
    tensors = [t.requires_grad_() for t in qkv()]
    weight = torch.randn(2, 200, 8, 64, device="cuda", dtype=torch.bfloat16)

    def results(out: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]

    exact = [t.detach().double().requires_grad_() for t in tensors]
    plain = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        pytorch = results(
            plain(*(t.transpose(1, 2) for t in tensors), is_causal=True, enable_gqa=True)
            .transpose(1, 2),
            *tensors,
        )  # fmt: skip
    out, lse = attention(*tensors, causal=True, return_lse=True, backend=served)
    exact_out, exact_lse = attention_reference(*exact, causal=True, return_lse=True)
    assert_close(lse, exact_lse.float(), "gradient", name="lse")
    rows = zip(
        ("out", "dq", "dk", "dv"), results(out, *tensors), results(exact_out, *exact), pytorch,
        strict=True,
    )  # fmt: skip
    for name, actual, wanted, ordinary in rows:
        assert_as_accurate(actual, wanted, ordinary, name)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(1, 3), (60, 64), (64, 60), (100, 77), (192, 127), (250, 250)]
)
def test_head_dims_of_any_size(dim: int, dim_v: int, packed: bool, served: str) -> None:
    """Forward and backward of tensors whose neighbours in memory are NaN, by the kernels."""
    torch.manual_seed(0)
    whole = [torch.full((2, 130, heads, 256), math.nan, device="cuda") for heads in (4, 2, 2)]
    inputs = []
    for tensor, columns in zip(whole, (dim, dim, dim_v), strict=True):
        tensor[..., 1 : columns + 1] = torch.randn(*tensor.shape[:3], columns, device="cuda")
        inputs.append(tensor.bfloat16()[..., 1 : columns + 1])
    grad_out = torch.randn(2, 130, 4, dim_v, device="cuda")

    def results(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        if packed:
            ends = torch.tensor([0, 77, 77, 260], dtype=torch.int32, device="cuda")
            rows = [t.flatten(0, 1) for t in leaves]
            out, lse = function(*rows, ends, ends, 183, 183, causal=True, return_lse=True)
        else:
            out, lse = function(*leaves, causal=True, return_lse=True)
        grads = torch.autograd.grad(out, leaves, grad_out.to(out.dtype).view(out.shape))
        return [out.detach(), lse.detach(), *grads]

    function = attention_varlen if packed else attention
    kernel = results(functools.partial(function, backend=served), inputs)
    exact = results(functools.partial(function, backend="reference"), [t.double() for t in inputs])
    plain = results(functools.partial(function, backend="reference"), inputs)
    assert_close(kernel[1], exact[1].float(), "gradient", name="lse")
    for name, actual, wanted, ordinary in zip(
        ("out", "dq", "dk", "dv"), kernel[:1] + kernel[2:], exact[:1] + exact[2:],
        plain[:1] + plain[2:], strict=True,
    ):  # fmt: skip
        assert actual.is_contiguous()
        assert_as_accurate(actual, wanted, ordinary, name)


@pytest.mark.parametrize("make", [
    lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),  # the last stride is not 1
    lambda t: torch.cat([t, t[..., :1]], -1)[..., :-1],  # rows that are not a multiple of 16 bytes
    lambda t: torch.cat([t.flatten(), t.flatten()])[1:][: t.numel()].view(t.shape),
    lambda t: t[:, :, :1].expand_as(t),
], ids=["last_stride", "row_stride", "address", "expanded"])  # fmt: skip
def test_strides_of_any_kind(make: Callable[[Tensor], Tensor], served: str) -> None:
    tensors = [make(t).detach().requires_grad_() for t in qkv()]
    plain = [t.detach().contiguous().clone().requires_grad_() for t in tensors]
    results = []
    for leaves in (tensors, plain):
        out = attention(*leaves, causal=True, backend=served, deterministic=True)
        grad_out = torch.randn(
            out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
        )
        results.append([out, *torch.autograd.grad(out, leaves, make(grad_out.to(out.dtype)))])
    for actual, wanted in zip(*results, strict=True):
        assert torch.equal(actual, wanted)


def test_varlen(served: str) -> None:
    q, k, v = (t[0] for t in qkv())
    offsets = torch.tensor([0, 77, 77, 200], dtype=torch.int32, device="cuda")
    out, lse = attention_varlen(
        q, k, v, offsets, offsets, 123, 123, causal=True, return_lse=True, backend=served
    )
    exact, exact_lse = attention_varlen_reference(
        q.double(), k.double(), v.double(), offsets, offsets, causal=True, return_lse=True
    )
    assert_close(lse, exact_lse.float(), "gradient", name="lse")
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(out.dtype).eps


def test_autocast_reaches_the_kernels(served: str) -> None:
    tensors = qkv(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(*tensors, causal=True, backend=served)
    cast = [t.bfloat16() for t in tensors]
    assert torch.equal(out, attention(*cast, causal=True, backend=served))


def test_streams(served: str) -> None:
    """A call reads what its own stream has written, while two streams run at once."""
    inputs = qkv(seqlen=1024)
    expected = [attention(*(t * factor for t in inputs), causal=True, backend=served)
                for factor in (1, 2)]  # fmt: skip
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for factor, stream in enumerate(streams, start=1):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            scaled = [t * factor for t in inputs]
            results.append(attention(*scaled, causal=True, backend=served))
    torch.cuda.synchronize()
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(served: str) -> None:
    torch.cuda.set_device(0)
    first = [t.requires_grad_() for t in qkv(device="cuda:0")]
    second = [t.detach().to("cuda:1").requires_grad_() for t in first]
    results = []
    for tensors in (first, second):
        out, lse = attention(*tensors, causal=True, return_lse=True, backend=served)
        assert out.device == lse.device == tensors[0].device
        results.append([out, lse, *torch.autograd.grad(out.float().sum(), tensors)])
    assert torch.cuda.current_device() == 0
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other.to("cuda:0"))


def test_cuda_graph_of_forward_and_backward(served: str) -> None:
    tensors = [t.requires_grad_() for t in qkv()]

    def run() -> list[Tensor]:
        out, lse = attention(*tensors, causal=True, return_lse=True, backend=served)
        return [out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), tensors)]

    graph, results = capture(run)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for actual, wanted in zip(results, run(), strict=True):
        assert torch.equal(actual, wanted)


def test_cuda_graph_of_packed_sequences() -> None:
    """A kernel reads cu_seqlens on the device, so a replay may have other lengths."""
    q, k, v = (t[0] for t in qkv())
    offsets = torch.tensor([0, 77, 77, 200], dtype=torch.int32, device="cuda")
    kernel = serving(q, k, v, offsets, offsets, 200, 200)[0]
    if kernel == "reference":
        pytest.skip("no kernel serves packed sequences on this GPU")

    def run() -> Tensor:
        return attention_varlen(q, k, v, offsets, offsets, 200, 200, backend=kernel)

    graph, out = capture(run)
    offsets.copy_(torch.tensor([0, 10, 190, 200]))
    graph.replay()
    assert torch.equal(out, run())


@pytest.mark.parametrize("seed", [None, 11])
def test_cuda_graph_draws_dropout_anew(seed: int | None) -> None:
    """A drawn seed differs between replays, a given one does not."""
    tensors = qkv()
    graph, out = capture(
        lambda: attention(*tensors, dropout_p=0.5, dropout_seed=seed, backend="reference")
    )
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    assert torch.equal(*replays) == (seed is not None)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str, served: str) -> None:
    torch._dynamo.reset()
    tensors = [t.requires_grad_() for t in qkv()]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend=served)

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    expected = run(*tensors)
    grads = torch.autograd.grad(expected.float().sum(), tensors)
    for _ in range(3):
        out = compiled(*tensors)
        assert torch.equal(out, expected)
        for one, other in zip(torch.autograd.grad(out.float().sum(), tensors), grads, strict=True):
            assert_close(one, other, "rounding")


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_opcheck_of_the_kernel_ops(softcap: float) -> None:
    q, k, v = qkv()
    answer = explain(q, k, v, softcap=softcap, window=(64, 0))
    if "reference" in (answer.chosen, answer.chosen_backward):
        pytest.skip("no kernel serves this GPU")
    options = (0.125, 64, 0, softcap)
    forward = torch.ops.cute_attention.forward.default
    for op in (forward, torch.ops.cute_attention.forward.output):
        torch.library.opcheck(op, (q, k, v, answer.chosen, *options))
    out, lse = forward(q, k, v, answer.chosen, *options)
    torch.library.opcheck(
        torch.ops.cute_attention.backward.default,
        (torch.randn_like(out), None, out, lse, True, q, k, v, answer.chosen_backward, *options),
    )


def host_time(run: Callable[[], Any]) -> float:
    """The host time of a call in microseconds. It is the smallest of several batches of calls,
    which are too short to fill the queue of the GPU."""
    batches = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            run()
        batches.append((time.perf_counter() - start) / 100)
    torch.cuda.synchronize()
    return min(batches) * 1e6


def test_host_overhead_of_a_cache() -> None:
    """The same of a decode step. The aim is 3 us above a plain call where the cache is read; what
    appends also launches a second kernel. The limits are loose, as a machine may be busy."""
    batch, room, heads, heads_kv, dim = 8, 1024, 32, 8, 128
    half = {"dtype": torch.float16, "device": "cuda"}
    q, new = torch.randn(batch, 1, heads, dim, **half), torch.randn(batch, 1, heads_kv, dim, **half)
    k, v = torch.randn(2, batch, room, heads_kv, dim, **half).unbind()
    pages = [cache.view(-1, 64, heads_kv, dim) for cache in (k, v)]
    table = torch.arange(batch * room // 64, dtype=torch.int32, device="cuda").view(batch, -1)
    lengths = torch.full((batch,), 100, dtype=torch.int32, device="cuda")
    angles = torch.rand(room, dim // 2, **half)
    append = {"k": new, "v": new}
    rotary = {**append, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if serving(q, k, v, causal=True)[0] == "reference":
        pytest.skip("no kernel serves this GPU")

    def reads(*caches: Tensor, **options: Any) -> float:
        call = functools.partial(attention_with_cache, q, *caches, lengths, causal=True, **options)
        return host_time(call)

    plain = host_time(lambda: attention(q, k, v, causal=True))
    times = {
        "read": reads(k, v), "read pages": reads(*pages, block_table=table),
        "append": reads(k, v, **append), "append, rotary": reads(k, v, **rotary),
        "append, rotary, pages": reads(*pages, block_table=table, **rotary),
    }  # fmt: skip
    print(f"plain {plain:.1f} us", *(f"{name} {us:.1f} us" for name, us in times.items()), sep=", ")
    assert max(times["read"], times["read pages"]) < plain + 8
    assert max(times.values()) < plain + 20


def test_host_overhead() -> None:
    """The host time from the Python call to the launch. The aim is 20 us without gradients and 35
    us with them, as docs/performance.md records. The limits are half as much more, as a machine may
    be busy."""
    tensors = qkv(seqlen=128)
    kernel = serving(*tensors, causal=True)[0]
    if kernel == "reference":
        pytest.skip("no kernel serves this GPU")
    plain = host_time(lambda: attention(*tensors, causal=True))
    for tensor in tensors:
        tensor.requires_grad_()
    graded = host_time(lambda: attention(*tensors, causal=True))
    print(f"{kernel}: {plain:.1f} us without gradients, {graded:.1f} us with")
    assert plain < 30
    assert graded < 52
