"""The smallest and the largest sizes on a GPU: no keys at all, and the longest sequence served."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from cute_attention import attention, kernels
from cute_attention.native.core import UNBOUNDED, core

pytestmark = pytest.mark.gpu

LONGEST = 2**30 - 256  # kMaxSeqlen of params.h
BFLOAT16 = 1  # DType of config.h
HEADS, HEADS_KV, DIM = 4, 2, 64


@pytest.fixture(params=["sm80", "sm90"])
def arch(request: pytest.FixtureRequest) -> str:
    """An architecture whose bf16 kernels of head dim 64 are built and run on this GPU."""
    if f"{request.param}_fwd_bf16_d64" not in {kernel.name for kernel in kernels()}:
        pytest.skip(f"no {request.param} kernels are built")
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm90 kernels need a GPU of compute capability 9.0")
    return request.param


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head")]


class AlibiSlopes(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


class BiasTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int32),
        ("is_float", ctypes.c_int32),
    ]


class DropoutOptions(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_void_p), ("drop_count", ctypes.c_int32)]


def fields(pointers: str, strides: str, last: str, biases: str) -> list[tuple[str, type]]:
    """The members of a struct of params.h."""
    shape = [(name, ctypes.c_int32) for name in ("batch", "seqlen_q", "seqlen_k")]
    shape += [(name, ctypes.c_int64) for name in ("total_q", "total_k")]
    heads = ("heads", "heads_kv", "head_dim", "head_dim_v")
    shape += [(name, ctypes.c_int32) for name in heads]
    shape += [(name, ctypes.c_float) for name in ("scale", "softcap")]
    shape += [(name, ctypes.c_int32) for name in ("window_left", "window_right")]
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((f"{name}_stride", Strides) for name in strides.split()),
        *shape,
        *((name, ctypes.c_void_p) for name in last.split()),
        ("alibi_slopes", AlibiSlopes),
        *((name, BiasTensor) for name in biases.split()),
        ("dropout", DropoutOptions),
    ]


class KeyCache(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("seqused_k", "leftpad_k", "batch_idx")),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("pages_per_sequence", "page_size", "pages")),
    ]


class AppendedKeys(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("seqused_k", "cu_seqlens")),
        *((name, ctypes.c_int32) for name in ("seqlen", "turns_q")),
    ]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        *fields("q k v o lse cu_seqlens_q cu_seqlens_k", "q k v o", "next_tile sink", "bias"),
        ("cache", KeyCache),
        ("split_workspace", ctypes.c_void_p),
        ("num_splits", ctypes.c_int32),
        ("qv", ctypes.c_void_p),
        ("qv_stride", Strides),
        ("batch_invariant", ctypes.c_int32),
        ("appended", AppendedKeys),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        *fields(
            "q k v o grad_o lse grad_lse grad_q grad_k grad_v delta grad_q_sum grad_q_turn "
            "grad_kv_parts cu_seqlens_q cu_seqlens_k",
            "q k v o grad_o grad_q grad_k grad_v",
            "sink grad_sink",
            "bias grad_bias",
        ),
        ("grad_bias_parts", ctypes.c_void_p),
    ]


class Workspace(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("delta", "grad_q_sum", "grad_q_turn", "grad_kv_parts", "grad_bias_parts")
    ]


def set_tensor(params: ctypes.Structure, name: str, tensor: Tensor) -> None:
    """Points a params struct at a tensor [batch, seqlen, heads, dim] or [total, heads, dim]."""
    setattr(params, name, tensor.data_ptr() or None)
    strides = (0, *tensor.stride())[-4:]
    setattr(params, f"{name}_stride", Strides(*strides[:3]))


def set_shape(params: ctypes.Structure, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    params.batch, params.seqlen_q, params.seqlen_k = batch, seqlen_q, seqlen_k
    params.heads, params.heads_kv = HEADS, HEADS_KV
    params.head_dim = params.head_dim_v = DIM
    params.scale = 0.125
    params.window_left = params.window_right = UNBOUNDED


def garbage(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, math.nan, device="cuda", dtype=dtype)


def call(name: str, params: ctypes.Structure, arch: str) -> None:
    function = getattr(core(), f"cute_attention_{name}")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = function(ctypes.byref(params), BFLOAT16, int(arch.removeprefix("sm")), 0, stream)
    assert error == 0, core().cute_attention_last_error().decode()
    torch.cuda.synchronize()


def forward(params: ForwardParams, q: Tensor, k: Tensor, arch: str) -> tuple[Tensor, Tensor]:
    """The output and the LSE that the C API writes over NaN."""
    out = garbage(*q.shape)
    lse = garbage(*q.shape[:-1], dtype=torch.float32)  # its order does not matter here
    for name, tensor in (("q", q), ("k", k), ("v", k), ("o", out)):
        set_tensor(params, name, tensor)
    params.lse = lse.data_ptr()
    call("forward", params, arch)
    return out, lse


def backward(params: BackwardParams, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that the C API writes over NaN, of queries that see no key."""
    grads = garbage(*q.shape), garbage(*k.shape), garbage(*k.shape)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -math.inf, device="cuda")
    tensors = {"q": q, "k": k, "v": k, "o": out, "grad_o": torch.ones_like(q)}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
    for name, tensor in tensors.items():
        set_tensor(params, name, tensor)
    sizes = Workspace()
    error = core().cute_attention_backward_workspace(
        ctypes.byref(params), BFLOAT16, 80, 0, ctypes.byref(sizes)
    )
    assert error == 0, core().cute_attention_last_error().decode()
    delta, sums = (garbage(size, dtype=torch.float32) for size in (sizes.delta, sizes.grad_q_sum))
    params.lse, params.delta, params.grad_q_sum = (
        tensor.data_ptr() or None for tensor in (lse, delta, sums)
    )
    call("backward", params, "sm80")
    return grads


def test_no_keys(arch: str) -> None:
    q, k = (torch.randn(2, n, h, DIM, device="cuda").bfloat16() for n, h in ((300, 4), (0, 2)))
    params = ForwardParams()
    set_shape(params, 2, 300, 0)
    out, lse = forward(params, q, k, arch)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_packed_sequences_without_rows(arch: str) -> None:
    """Three empty sequences, and five rows of q that belong to no sequence. k has no rows, or five
    that belong to no sequence."""
    offsets = torch.zeros(4, device="cuda", dtype=torch.int32)
    q = torch.randn(5, HEADS, DIM, device="cuda").bfloat16()
    for total_k, longest in ((0, 0), (5, 0), (0, 64)):
        params = ForwardParams()
        set_shape(params, 3, longest, longest)
        params.total_q, params.total_k = 5, total_k
        params.cu_seqlens_q = params.cu_seqlens_k = offsets.data_ptr()
        k = torch.randn(total_k, HEADS_KV, DIM, device="cuda").bfloat16()
        out, lse = forward(params, q, k, arch)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 0), (0, 300)])
def test_gradients_of_one_side_alone(seqlen_q: int, seqlen_k: int) -> None:
    q, k = (
        torch.randn(2, n, h, DIM, device="cuda").bfloat16()
        for n, h in ((seqlen_q, HEADS), (seqlen_k, HEADS_KV))
    )
    params = BackwardParams()
    set_shape(params, 2, seqlen_q, seqlen_k)
    for gradient in backward(params, q, k):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(("total_q", "total_k"), [(5, 7), (5, 0), (0, 7)])
def test_gradients_of_packed_sequences_without_rows(total_q: int, total_k: int) -> None:
    offsets = torch.zeros(4, device="cuda", dtype=torch.int32)
    q, k = (
        torch.randn(n, h, DIM, device="cuda").bfloat16()
        for n, h in ((total_q, HEADS), (total_k, HEADS_KV))
    )
    params = BackwardParams()
    set_shape(params, 3, 0, 0)
    params.total_q, params.total_k = total_q, total_k
    params.cu_seqlens_q = params.cu_seqlens_k = offsets.data_ptr()
    for gradient in backward(params, q, k):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_longest_sequence(arch: str) -> None:
    """The keys are zeros, so that an output is the mean of the values that its query sees. The last
    tile is not full. One value in 1024 is 1 and the others are 0, because fp32 cannot hold the sum
    of more than 2^24 ones exactly."""
    queries, keys, dim = 1000, LONGEST - 1, 8
    if torch.cuda.mem_get_info()[0] < 3 * keys * dim * 2:
        pytest.skip("needs two tensors of 17 GB on the GPU")
    q = torch.ones(1, queries, 1, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(1, keys, 1, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    v[:, ::1024] = 1
    for causal in (False, True):
        out, lse = attention(q, k, v, causal=causal, return_lse=True, backend=arch)
        assert (1024 * out.float() - 1).abs().max() < 0.01
        assert (lse - math.log(keys)).abs().max() < 0.001
    v[:, -2 * queries :] = torch.randn(1, 2 * queries, 1, dim, device="cuda").bfloat16()
    out, lse = attention(q, k, v, window=(3, 0), return_lse=True, backend=arch)
    seen = v[0, -queries - 3 :, 0].double().unfold(0, 4, 1)  # [queries, dim, 4]
    assert (out[0, :, 0].double() - seen.mean(-1)).abs().max() < 0.02
    assert (lse - math.log(4)).abs().max() < 0.001
