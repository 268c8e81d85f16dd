"""torch.ops.flash_attn_3 after install(): the operators compute what our functions do. In processes
of their own, since install() changes a whole process."""

from __future__ import annotations

from test_flash_attn_install import run

START = """
import torch
from torch import Tensor
import cute_attention.flash_attn
import cute_attention.flash_attn_interface as ours
cute_attention.flash_attn.install()
cute_attention.flash_attn.install()
ops = torch.ops.flash_attn_3
torch.manual_seed(0)
q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
"""


def test_forward_and_backward() -> None:
    run(
        START
        + """
for t in (q, k, v):
    t.requires_grad_()
expected, expected_lse = ours.flash_attn_func(q, k, v, causal=True, window_size=(3, 0),
                                              softcap=2.0, return_attn_probs=True)
dout = torch.randn_like(expected)
wanted = torch.autograd.grad(expected, (q, k, v), dout)
given = {"is_causal": True, "window_size_left": 3, "softcap": 2.0}
with torch.no_grad():
    buffer = torch.empty_like(expected)
    out, lse, *rest = ops.fwd(q, k, v, out=buffer, **given)
    assert out.data_ptr() == buffer.data_ptr() and [t.numel() for t in rest] == [0, 0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    # By position, some of the gradients with a place of their own.
    dk = torch.empty_like(k)
    grads = ops.bwd(dout, q, k, v, out, lse, None, dk, **given)
    assert grads[1].data_ptr() == dk.data_ptr()
    for found, want in zip(grads, wanted):
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(grads[3], (dout * out).sum(-1).transpose(1, 2))
    assert len(grads) == 8
"""
    )


def test_packed_unused_rows() -> None:
    run(
        START
        + """
cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 10], [0, 7, 14]))
used = torch.tensor([5, 4], dtype=torch.int32)
rows = [t.flatten(0, 1).detach().requires_grad_() for t in (q, k, v)]
out = ours.flash_attn_varlen_func(*rows, cu_q, cu_k, 5, 7, seqused_k=used)
wanted = torch.autograd.grad(out, rows, torch.ones_like(out))
packing = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used, max_seqlen_q=5, max_seqlen_k=7)
with torch.no_grad():
    found, lse, *_ = ops.fwd(*rows, **packing)
    torch.testing.assert_close(found, out)
    grads = ops.bwd(torch.ones_like(out), *rows, found, lse, **packing)
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad, want)
"""
    )


def test_cache_parts_and_schedule() -> None:
    run(
        START
        + """
lengths = torch.tensor([3, 6], dtype=torch.int32)
new = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
cos, sin = torch.rand(11, 8).cos(), torch.rand(11, 8).sin()
caches = [t.clone() for t in (k, v, k, v)]
out, lse, *_ = ops.fwd(q, *caches[:2], *new, seqused_k=lengths, rotary_cos=cos, rotary_sin=sin,
                       is_causal=True)
expected = ours.flash_attn_with_kvcache(q, *caches[2:], *new, rotary_cos=cos, rotary_sin=sin,
                                        cache_seqlens=lengths, causal=True,
                                        rotary_interleaved=False)
assert torch.equal(out, expected) and torch.equal(caches[0], caches[2])
assert not torch.equal(caches[0], k)
lses = lse.transpose(1, 2)[None]
whole, _ = ops.fwd_combine(out[None], lses, None, torch.float64)
assert whole.dtype == torch.float64
torch.testing.assert_close(whole.float(), out)
hint = ops.get_scheduler_metadata(2, 5, 7, 4, 2, 16, 16, torch.bfloat16, lengths, is_causal=True)
assert (hint.dtype, hint.numel()) == (torch.int32, 0)
"""
    )


def test_install_refuses_to_come_after_the_real_operators() -> None:
    printed = run(
        """
import sys
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
import cute_attention.flash_attn
try:
    cute_attention.flash_attn.install()
except RuntimeError as error:
    print(error)
assert "flash_attn" not in sys.modules
"""
    )
    assert printed.startswith("install: torch.ops.flash_attn_3.fwd is registered already")
