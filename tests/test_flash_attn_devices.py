"""flash-attn's names on the CPU and on a GPU: the same results as the float32 ones of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import flash_attn, flash_attn_interface
from flash_attn_plain import cumulative

DTYPE = torch.bfloat16
CLOSE = {"rtol": 2e-2, "atol": 2e-2}  # of bfloat16 results of numbers up to about 4

Run = Callable[..., tuple[Tensor, ...]]


def on(device: str, value: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a tensor, on that device and, where it is floating, in that dtype."""
    if not isinstance(value, Tensor):
        return value
    floating = value.is_floating_point() and dtype is not None
    return value.detach().to(device, dtype if floating else value.dtype, copy=True)


def assert_same(device: str, run: Run, inputs: dict[str, Tensor], gradients: bool = False) -> None:
    """`run` of bfloat16 on the device beside `run` of the same numbers in float32 on the CPU."""
    results = []
    for where, dtype in ((device, DTYPE), ("cpu", torch.float32)):
        mine = {name: on(where, on("cpu", t, DTYPE), dtype) for name, t in inputs.items()}
        wanted = [t.requires_grad_() for t in mine.values() if gradients and t.is_floating_point()]
        outs = run(**mine)
        if wanted:
            grad = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1))
            outs += torch.autograd.grad(outs[0], wanted, on(where, grad.to(DTYPE), dtype))
        results.append(outs)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.float().cpu(), other.float(), **CLOSE)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def test_dense(device: str) -> None:
    torch.manual_seed(0)
    inputs = {"q": rand(2, 130, 4, 64), "k": rand(2, 150, 2, 64), "v": rand(2, 150, 2, 64)}

    def second(**tensors: Tensor) -> tuple[Tensor, ...]:
        return flash_attn.flash_attn_func(
            **tensors, causal=True, window_size=(70, -1), return_attn_probs=True
        )[:2]

    def third(**tensors: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_interface.flash_attn_func(
            **tensors, causal=True, attention_chunk=37, return_attn_probs=True
        )

    assert_same(device, second, inputs, gradients=True)
    assert_same(device, third, inputs, gradients=True)


def test_dropout_of_one_seed(device: str) -> None:
    torch.manual_seed(0)
    q = rand(2, 130, 4, 64).to(device, DTYPE).requires_grad_()
    out, _, s_dmask = flash_attn.flash_attn_func(q, q, q, 0.17, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 256, 256)
    dropped = (s_dmask[..., :130, :130] < 0).float().mean().item()
    assert abs(dropped - 44 / 256) < 0.01
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.isfinite().all()
    # The gradient of v alone: of each value the sum of what its column keeps, times 1 / (1 - p).
    weights = s_dmask[..., :130, :130].float()
    probabilities = weights.abs() / weights.abs().sum(-1, keepdim=True)
    expected = (probabilities * (weights >= 0) / 0.83) @ q.detach().float().transpose(1, 2)
    torch.testing.assert_close(out.float().transpose(1, 2), expected, **CLOSE)


def test_unused_rows(device: str) -> None:
    torch.manual_seed(0)
    packing = {
        "cu_seqlens_q": cumulative(70, 0, 60), "cu_seqlens_k": cumulative(80, 9, 61),
        "seqused_q": torch.tensor([64, 0, 60]).int(), "seqused_k": torch.tensor([80, 3, 40]).int(),
    }  # fmt: skip
    inputs = {"q": rand(130, 4, 64), "k": rand(150, 2, 64), "v": rand(150, 2, 64), **packing}

    def run(**tensors: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_interface.flash_attn_varlen_func(
            **tensors, max_seqlen_q=70, max_seqlen_k=80, causal=True, return_attn_probs=True
        )

    assert_same(device, run, inputs, gradients=True)


ANGLE = torch.rand(96, 8, generator=torch.Generator().manual_seed(2)) * 6
TABLE = torch.tensor([[5, 1, 7], [0, 3, 2], [8, 6, 4]], dtype=torch.int32)
FORMS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "leftpad": {"cache_leftpad": torch.tensor([0, 5, 33], dtype=torch.int32)},
    "batch_idx": {"cache_batch_idx": torch.tensor([2, 0, 1], dtype=torch.int32)},
    "rotary": {"rotary_cos": ANGLE.cos(), "rotary_sin": ANGLE.sin()},
    "pages": {"block_table": TABLE},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_caches(device: str, form: str, seqlen_q: int) -> None:
    torch.manual_seed(0)
    rows = (9, 32) if form == "pages" else (3, 96)
    inputs = {
        "q": rand(3, seqlen_q, 4, 64), "k_cache": rand(*rows, 2, 64), "v_cache": rand(*rows, 2, 64),
        "k": rand(3, 4, 2, 64), "v": rand(3, 4, 2, 64),
        "cache_seqlens": torch.tensor([0, 40, 92], dtype=torch.int32), **FORMS[form],
    }  # fmt: skip

    def run(**tensors: Tensor) -> tuple[Tensor, ...]:
        results = flash_attn.flash_attn_with_kvcache(
            **tensors, causal=True, return_softmax_lse=True
        )
        return (*results, tensors["k_cache"], tensors["v_cache"])

    if form == "rotary":  # of 96 positions the last queries of the last sequence have none
        inputs["cache_seqlens"] = torch.tensor([0, 40, 91], dtype=torch.int32)
    assert_same(device, run, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "leftpad", "batch_idx", "pages"])
def test_a_graph_reads_lengths_when_it_runs(form: str) -> None:
    torch.manual_seed(0)
    rows = (9, 32) if form == "pages" else (3, 96)
    cache = [rand(*rows, 2, 64).to("cuda", DTYPE) for _ in range(2)]
    q, k, v = (rand(3, 1, heads, 64).to("cuda", DTYPE) for heads in (4, 2, 2))
    lengths = torch.tensor([2, 40, 70], dtype=torch.int32, device="cuda")
    given = {name: value.cuda() for name, value in FORMS[form].items()}

    def run(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, **given
        )

    copies = [tensor.clone() for tensor in cache]
    run(*copies)  # what is loaded at a first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*cache)
    lengths += 9
    copies = [tensor.clone() for tensor in cache]
    expected = run(*copies)
    graph.replay()
    torch.testing.assert_close(out, expected, **CLOSE)
    assert all(torch.equal(*pair) for pair in zip(cache, copies, strict=True))


@pytest.mark.parametrize("form", ["packed", "plain", "leftpad", "batch_idx", "pages"])
def test_fp8(device: str, form: str) -> None:
    """The same bfloat16 arithmetic on both devices; of a cache the same bytes."""
    torch.manual_seed(0)
    fp8 = torch.float8_e4m3fn
    rows = {"packed": (150,), "pages": (9, 32)}.get(form, (3, 96))
    shapes = {
        "q": (130, 4, 64) if form == "packed" else (3, 5, 4, 64),
        "k": (*rows, 2, 64), "v": (*rows, 2, 64), "k_new": (3, 4, 2, 64), "v_new": (3, 4, 2, 64),
    }  # fmt: skip
    inputs = {name: rand(*shape).to(fp8) for name, shape in shapes.items()}
    scales = {f"{name}_descale": torch.rand(3, 2) + 0.5 for name in "qkv"}
    packing = {"cu_seqlens_q": cumulative(70, 0, 60), "cu_seqlens_k": cumulative(80, 9, 61)}
    lengths = torch.tensor([0, 40, 92], dtype=torch.int32)
    results = []
    for where in (device, "cpu"):
        q, k, v, k_new, v_new = (on(where, tensor) for tensor in inputs.values())
        given = {name: on(where, value) for name, value in scales.items()}
        if form == "packed":
            given |= {name: on(where, value) for name, value in packing.items()}
            outs = flash_attn_interface.flash_attn_varlen_func(
                q, k, v, max_seqlen_q=70, max_seqlen_k=80, causal=True, return_attn_probs=True,
                **given,
            )  # fmt: skip
        else:
            for name, value in FORMS[form].items():
                given[name.replace("block", "page")] = on(where, value)
            outs = flash_attn_interface.flash_attn_with_kvcache(
                q, k, v, k_new, v_new, cache_seqlens=on(where, lengths), causal=True,
                return_softmax_lse=True, **given,
            )  # fmt: skip
        results.append((*outs, k, v))
    assert all(torch.equal(one.cpu().float(), other.float()) for one, other in
               zip(results[0][2:], results[1][2:], strict=True))  # fmt: skip
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(one.float().cpu(), other.float(), **CLOSE)
