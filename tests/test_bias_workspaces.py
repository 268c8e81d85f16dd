"""The workspaces of a backward with a bias: the kernel that reads it, and so the queries of a step,
follow from the address of the bias, which is not known when a caller asks for their sizes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.native import rows
from cute_attention.native.core import core
from every_row import DTYPES, fixture_of, skip_unless_one_feature_chooses_it
from kernel_calls import inputs_of, shape_of_bias
from test_bias_tiles import aligned, crooked
from test_grad_bias import BACKWARD, Shared, params_of
from test_key_parts import codes, workspace_of
from test_sizes import BiasTensor, garbage, set_tensor
from tolerances import assert_close

pytestmark = pytest.mark.gpu

row = fixture_of(BACKWARD, skip_unless_one_feature_chooses_it)

# 14 tiles of 64 queries for a head, 7 of 128, and few blocks of keys: their steps are divided.
CASE = Shared((1, 4, 850, 200), 1, 850, 200)
BEHIND = 4096  # floats behind a workspace


@pytest.mark.parametrize("numbers", [None, torch.float32], ids=["16 bits", "fp32"])
@pytest.mark.parametrize("kept", ["hqk", "hk"])
@pytest.mark.parametrize("layout", [aligned, crooked], ids=lambda layout: layout.__name__)
def test_nothing_is_written_behind_them(
    row: rows.TableRow, numbers: torch.dtype | None, kept: str, layout: Callable[[Tensor], Tensor]
) -> None:
    """The sizes are asked for without the address of the bias. In a fixed order each tile of
    queries has a counter, too."""
    q, k, v, grad_out = inputs_of(row, 1, (CASE.queries, CASE.keys), (CASE.heads, CASE.heads_kv))
    shape = shape_of_bias(kept, 1, CASE.heads, CASE.queries, CASE.keys)
    bias = layout(torch.randn(shape, device="cuda").to(numbers or DTYPES[row.dtype]))
    how = {"bias": bias, "backend": row.arch, "deterministic": True}
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True, **how)
    expected = torch.autograd.grad(out, leaves, grad_out)

    params = params_of(row, CASE, bias, bias)
    params.grad_bias = BiasTensor()
    address, params.bias.data = params.bias.data, 1  # not null is all that is known of it
    sizes = workspace_of(row, params)
    params.bias.data = address
    found = [torch.full_like(t, math.nan) for t in (q, k, v)]
    tensors = {"q": q, "k": k, "v": v, "o": out.detach(), "grad_o": grad_out}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), found, strict=True))
    for field, tensor in tensors.items():
        set_tensor(params, field, tensor)
    params.lse = lse.data_ptr()
    spaces = {}
    for name in ("delta", "grad_q_sum", "grad_q_turn", "grad_kv_parts"):
        spaces[name] = garbage(getattr(sizes, name) + BEHIND, dtype=torch.float32)
        setattr(params, name, spaces[name].data_ptr())
    if sizes.grad_kv_parts == 0:
        params.grad_kv_parts = None
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = core().cute_attention_backward(ctypes.byref(params), *codes(row), stream)
    assert error == 0, core().cute_attention_last_error().decode()
    torch.cuda.synchronize()

    for name, space in spaces.items():
        assert space[-BEHIND:].isnan().all(), name
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert_close(a, b, "stored", name=name)
