"""FP8 by FlashAttention-3's names: scales, packed calls, caches, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.cache_arguments import CacheArguments
from cute_attention.flash_attn_interface import (
    _flash_attn_forward,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cute_attention.inference import attention_with_cache
from cute_attention.inference.lowered import lowered_forward
from flash_attn_plain import cumulative, plain, plain_packed

FP8 = torch.float8_e4m3fn
# Each scaled number of q and v is rounded to the 8 bits of bfloat16, and so is the output.
CLOSE: dict[str, float] = {"rtol": 2e-2, "atol": 2e-2}
BATCH, HEADS, HEADS_KV, DIM = 3, 4, 2, 16


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).to(FP8)


def scales() -> dict[str, Tensor]:
    """A different one for each head of each sequence."""
    return {f"{name}_descale": torch.rand(BATCH, HEADS_KV) + 0.5 for name in "qkv"}


def scaled(x: Tensor, scale: Tensor | None, index: Tensor | None = None) -> Tensor:
    """x in float64; rows of packed tensors are of the sequences in `index`."""
    x = x.double()
    if scale is None:
        return x
    scale = scale.double().repeat_interleave(x.shape[-2] // HEADS_KV, 1)
    return x * (scale[:, None, :, None] if index is None else scale[index][..., None])


@pytest.mark.parametrize("given", ["none", "q", "qk", "v", "all"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_dense(given: str, chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = rand(BATCH, 5, HEADS, DIM), rand(BATCH, 7, HEADS_KV, DIM), rand(BATCH, 7, HEADS_KV, 8)
    letters = {"none": "", "all": "qkv"}.get(given, given)
    some = {name: scale for name, scale in scales().items() if name[0] in letters}
    out, lse = flash_attn_func(
        q, k, v, causal=True, attention_chunk=chunk, return_attn_probs=True, **some
    )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wide = (
        scaled(x, some.get(f"{name}_descale")) for name, x in zip("qkv", (q, k, v), strict=True)
    )
    expected, expected_lse = plain(*wide, causal=True, chunk=chunk)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)
    private = _flash_attn_forward(q, k, v, causal=True, attention_chunk=chunk, **some)
    assert torch.equal(private[0], out)


def test_qv_has_the_scale_of_q_alone() -> None:
    torch.manual_seed(0)
    q, k, v = rand(BATCH, 5, HEADS, DIM), rand(BATCH, 7, HEADS_KV, DIM), rand(BATCH, 7, HEADS_KV, 8)
    qv, some = rand(BATCH, 5, HEADS, 8), scales()
    out = flash_attn_func(q, k, v, qv=qv, **some)
    wide = (scaled(x, some[f"{name}_descale"]) for name, x in zip("qkv", (q, k, v), strict=True))
    expected, _ = plain(*wide, qv=scaled(qv, some["q_descale"]))
    torch.testing.assert_close(out.double(), expected, **CLOSE)


@pytest.mark.parametrize("unused", [False, True])
def test_packed(unused: bool) -> None:
    torch.manual_seed(0)
    cu_q, cu_k = cumulative(5, 0, 3), cumulative(4, 2, 7)
    q, k, v = rand(8, HEADS, DIM), rand(13, HEADS_KV, DIM), rand(13, HEADS_KV, DIM)
    some = scales()
    given: dict[str, Any] = {"seqused_k": torch.tensor([4, 2, 7]).int()} if unused else {}
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, **some, **given)
    of_q, of_k = (
        torch.arange(BATCH).repeat_interleave(ends.diff().long()) for ends in (cu_q, cu_k)
    )
    wide = (
        scaled(q, some["q_descale"], of_q),
        scaled(k, some["k_descale"], of_k),
        scaled(v, some["v_descale"], of_k),
    )
    expected, _ = plain_packed(*wide, cu_q, cu_k)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_packed_qkv() -> None:
    qkv = torch.randn(BATCH, 5, 3, HEADS_KV, DIM).to(FP8)
    some = scales()
    out = flash_attn_qkvpacked_func(qkv, **some)
    assert torch.equal(out, flash_attn_func(*qkv.unbind(2), **some))


ROOM, PAGE = 24, 4
LENGTHS = torch.tensor([0, 7, 13], dtype=torch.int32)


@pytest.mark.parametrize("way", ["reference", "kernels"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("picked", [False, True])
def test_cache(way: str, paged: bool, picked: bool) -> None:
    """New keys are rounded into the cache, their bits and no others change, and a kernel gets a
    copy in q's dtype of the sequences that the call names."""
    torch.manual_seed(0)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32) if picked else torch.arange(3).int()
    given: dict[str, Any] = {"cache_batch_idx": rows} if picked else {}
    if paged:
        table = torch.randperm(2 * 5 * ROOM // PAGE)[: 5 * ROOM // PAGE].view(5, -1).int()
        caches = [rand(2 * 5 * ROOM // PAGE, PAGE, HEADS_KV, DIM) for _ in range(2)]
        given["block_table"] = table

        def flat(cache: Tensor) -> Tensor:
            return cache.float()[table.long()].flatten(1, 2)[rows.long()]
    else:
        caches = [rand(5, ROOM, HEADS_KV, DIM) for _ in range(2)]

        def flat(cache: Tensor) -> Tensor:
            return cache.float()[rows.long()]

    q = torch.randn(BATCH, 2, HEADS, DIM).bfloat16()
    new = [torch.randn(BATCH, 2, HEADS_KV, DIM).bfloat16() for _ in range(2)]
    before = [flat(cache).clone() for cache in caches]
    numbers = [int(cache.view(torch.uint8).long().sum()) for cache in caches]
    if way == "reference":
        out = attention_with_cache(q, *caches, LENGTHS, k=new[0], v=new[1], causal=True, **given)
    else:
        call = CacheArguments(
            q, *caches, LENGTHS, "reference", DIM**-0.5, -1, 0, k=new[0], v=new[1], **given
        )
        out, _ = lowered_forward(call)
    for cache, old, rows_new, number in zip(caches, before, new, numbers, strict=True):
        for b, start in enumerate(LENGTHS.tolist()):
            old[b, start : start + 2] = rows_new[b].to(FP8).float()
        assert torch.equal(flat(cache), old)
        assert int(cache.view(torch.uint8).long().sum()) != number
    for b, start in enumerate(LENGTHS.tolist()):
        keys, values = (flat(cache)[b : b + 1, : start + 2] for cache in caches)
        expected, _ = plain(q[b : b + 1], keys, values, causal=True)
        torch.testing.assert_close(out[b : b + 1].double(), expected, **CLOSE)


def test_nan_behind_the_tokens_of_a_cache_is_not_read() -> None:
    caches = [torch.full((1, ROOM, HEADS_KV, DIM), torch.nan).to(FP8) for _ in range(2)]
    for cache in caches:
        cache.view(torch.uint8)[:, :3] = 0x38  # 1.0
    q = torch.randn(1, 1, HEADS, DIM).bfloat16()
    call = CacheArguments(q, *caches, torch.tensor([3]).int(), "reference", 0.25)
    out, _ = lowered_forward(call)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("packed", [False, True])
def test_cache_with_scales_and_rotary(packed: bool) -> None:
    torch.manual_seed(0)
    q, new = rand(BATCH, 2, HEADS, DIM), [rand(BATCH, 2, HEADS_KV, DIM) for _ in range(2)]
    caches = [rand(BATCH, ROOM, HEADS_KV, DIM) for _ in range(2)]
    cos, sin = torch.randn(ROOM, DIM // 2).cos().to(FP8), torch.randn(ROOM, DIM // 2).sin().to(FP8)
    some = scales()
    wide = [x.bfloat16() for x in (q, *caches, *new, cos, sin)]
    given: dict[str, Any] = {"cache_seqlens": LENGTHS, "causal": True}
    # The same in bfloat16, with the scales on the operands.
    factor = (some["q_descale"] * some["k_descale"]).repeat_interleave(2, 1)[:, None, :, None]
    expected = flash_attn_with_kvcache(
        (wide[0] * factor).bfloat16(), *wide[1:5], rotary_cos=wide[5], rotary_sin=wide[6], **given
    )
    expected = expected * some["v_descale"].repeat_interleave(2, 1)[:, None, :, None]
    if packed:
        ends = cumulative(2, 2, 2)
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k_new": ends, "max_seqlen_q": 2}
        q, *new = (x.flatten(0, 1) for x in (q, *new))
    out = flash_attn_with_kvcache(q, *caches, *new, rotary_cos=cos, rotary_sin=sin, **given, **some)
    assert out.dtype == torch.bfloat16
    # The appended keys were rounded to the 3 bits of FP8.
    torch.testing.assert_close(out.view_as(expected).float(), expected, rtol=0.2, atol=0.2)
    for cache, was in zip(caches, wide[1:3], strict=True):
        for b, start in enumerate(LENGTHS.tolist()):
            torch.testing.assert_close(
                cache[b, start : start + 2].float(), was[b, start : start + 2].float(),
                rtol=2**-3, atol=2**-9,
            )  # fmt: skip


def test_there_is_no_gradient() -> None:
    q = torch.randn(1, 2, 2, 8).to(FP8).requires_grad_()
    out = flash_attn_func(q, q, q)
    assert out.requires_grad
    with pytest.raises(NotImplementedError, match="no gradient with FP8"):
        out.sum().backward()


def test_what_is_refused() -> None:
    q, k = rand(BATCH, 2, HEADS, DIM), rand(BATCH, 2, HEADS_KV, DIM)
    wide, scale = q.bfloat16(), torch.ones(BATCH, HEADS_KV)
    with pytest.raises(ValueError, match=r"flash_attn_func: k_descale is given.*torch.bfloat16"):
        flash_attn_func(wide, wide, wide, k_descale=scale)
    with pytest.raises(ValueError, match=r"q_descale has shape \[3\], expected \[3, 2\]"):
        flash_attn_func(q, k, k, q_descale=scale[:, 0])
    with pytest.raises(TypeError, match=r"v_descale is a float, expected a torch.Tensor"):
        flash_attn_func(q, k, k, v_descale=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"flash_attn_func: v has dtype torch.bfloat16"):
        flash_attn_func(q, k, k.bfloat16())
    with pytest.raises(TypeError, match=r"flash_attn_func: k has dtype torch.float8_e4m3fn"):
        flash_attn_func(wide, k, k)
    with pytest.raises(ValueError, match=r"kvcache: v_descale is given"):
        flash_attn_with_kvcache(wide, k, k, v_descale=scale)
    with pytest.raises(TypeError, match=r"v_cache has dtype torch.bfloat16"):
        flash_attn_with_kvcache(q, k, k.bfloat16())
    with pytest.raises(TypeError, match=r"with_cache: v_cache has dtype torch.float8_e4m3fn"):
        attention_with_cache(wide, k.bfloat16(), k, 1)
