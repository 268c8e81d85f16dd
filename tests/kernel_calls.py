"""Calls of kernels on a GPU: their inputs, and what the formula in float64 and plain PyTorch say of
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.native import rows
from cute_attention.semantics import dropout
from cute_attention.semantics.formula import attention_reference
from every_row import DTYPES, options_of
from tolerances import ACCURACY_FACTOR, assert_as_accurate, assert_close

SOFTCAP = 2.5  # changes scores with a standard deviation of 1, and makes huge ones all alike


@dataclass(frozen=True)
class Case:
    """One call; `magnitude` is the standard deviation of q and k."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    options: dict[str, Any]
    magnitude: float = 1.0


CAUSAL = {"causal": True}
CASES = {
    "one_token": Case(1, 1, 1, 2, 2, {}),
    "square": Case(2, 256, 256, 4, 4, {}),
    "square_causal": Case(2, 256, 256, 4, 4, CAUSAL),
    "ragged": Case(2, 113, 203, 4, 4, {}),
    "ragged_causal": Case(2, 113, 203, 4, 4, CAUSAL),
    "decode": Case(3, 1, 517, 4, 4, CAUSAL),
    "queries_longer_than_keys": Case(2, 300, 129, 4, 2, CAUSAL),
    "one_key": Case(2, 130, 1, 4, 4, CAUSAL),
    "no_keys": Case(2, 65, 0, 4, 4, {}),
    "half_a_tile": Case(1, 192, 192, 2, 2, CAUSAL),  # seqlen % 128 == 64
    "gqa": Case(2, 200, 333, 6, 2, CAUSAL),
    "mqa": Case(2, 129, 257, 8, 1, {}),
    # Several query heads of a KV head share a tile of sm90 where the sequence is short.
    "gqa_decode": Case(3, 1, 517, 16, 2, CAUSAL),
    "gqa_of_seven": Case(2, 9, 300, 14, 2, CAUSAL),
    "mqa_of_more_heads_than_rows": Case(1, 3, 257, 71, 1, CAUSAL),
    "gqa_queries_longer_than_keys": Case(2, 40, 17, 8, 2, CAUSAL),
    "gqa_short_window": Case(2, 20, 300, 8, 2, {"window": (30, 3)}),
    "window": Case(2, 300, 350, 4, 4, {"window": (40, 17)}),
    "window_left": Case(2, 511, 300, 4, 4, {"window": (64, 0)}),
    "window_one_key": Case(2, 200, 200, 4, 4, {"window": (0, 0)}),
    "window_right": Case(2, 77, 300, 4, 4, {"window": (None, 5)}),
    "window_without_keys": Case(1, 300, 100, 4, 4, {"window": (5, 5)}),
    "scale": Case(2, 150, 170, 4, 4, {"scale": 0.3, "causal": True}),
    "huge_logits": Case(1, 200, 300, 2, 2, CAUSAL, magnitude=12.0),
    # The maximum grows by far from one tile to the next.
    "growing_maximum": Case(1, 200, 900, 2, 2, {}, magnitude=4.0),
    # The first key that row 0 sees is the last of a tile that all rows see whole.
    "no_key_before_a_full_tile": Case(1, 128, 255, 2, 2, CAUSAL, magnitude=3.0),
    "long_causal": Case(1, 1500, 1500, 2, 2, CAUSAL),
}


def options_for(row: rows.TableRow, options: dict[str, Any], heads: int) -> dict[str, Any]:
    """The options, with those added that the row's score modifiers need."""
    return options_of(row, options, heads, SOFTCAP)


def strided(*shape: int, dtype: torch.dtype, magnitude: float = 1.0) -> Tensor:
    """Random values with strides that no contiguous tensor has. The last stride is 1."""
    *outer, dim = shape
    whole = torch.randn(*outer[::-1], dim + 8, device="cuda") * magnitude
    return whole.to(dtype).permute(*range(len(outer))[::-1], len(outer))[..., :dim]


def plain_probabilities(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The probabilities, `[batch, heads, seqlen_q, seqlen_k]`, and the LSE, with every step in the
    dtype of the inputs, but for the terms of ALiBi. Dropout is left out."""
    heads, heads_kv, seqlen_q, seqlen_k = q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    q, k = (t.transpose(1, 2) for t in (q, k))
    k = k.repeat_interleave(heads // heads_kv, 1)
    scores = q @ k.transpose(-1, -2) * options.get("scale", q.shape[-1] ** -0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    position = torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device="cuda")
    if (slopes := options.get("alibi_slopes")) is not None:  # distances need more than 16 bits
        distances = slopes[..., None, None] * (position - key).abs()
        scores = (scores.float() - distances).to(q.dtype)
    if (bias := options.get("bias")) is not None:
        scores = (scores + bias).to(q.dtype)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    if left is not None:
        hidden |= key < position - left
    if right is not None:
        hidden |= key > position + right
    scores = scores.masked_fill(hidden, -math.inf)
    if (sink := options.get("sink")) is not None:
        logits = sink[None, :, None, None].to(q.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], -1)
    return scores.softmax(-1).nan_to_num()[..., :seqlen_k], scores.float().logsumexp(-1)


def plain_pytorch(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The formula with every step in the dtype of the inputs, but for the terms of ALiBi."""
    heads, heads_kv, seqlen_q, seqlen_k = q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    probabilities, lse = plain_probabilities(q, k, options)
    if p := options.get("dropout_p"):
        seed = dropout.as_seed(options["dropout_seed"], "cuda")
        heads_of_all = (0, q.shape[0] * heads)
        kept = dropout.keep_mask(seed, p, heads_of_all, (0, seqlen_q), (0, seqlen_k))
        probabilities = probabilities * kept.view_as(probabilities) * dropout.keep_scale(p)
    out = probabilities @ v.transpose(1, 2).repeat_interleave(heads // heads_kv, 1)
    return out.transpose(1, 2), lse


def case_inputs(row: rows.TableRow, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v. Each has other strides."""
    dtype, batch, magnitude = DTYPES[row.dtype], case.batch, case.magnitude
    q = strided(batch, case.seqlen_q, case.heads, row.head_dim, dtype=dtype, magnitude=magnitude)
    k = strided(batch, case.seqlen_k, case.heads_kv, row.head_dim, dtype=dtype, magnitude=magnitude)
    return q, k, strided(batch, case.seqlen_k, case.heads_kv, row.head_dim_v, dtype=dtype)


def inputs_of(
    row: rows.TableRow, batch: int, seqlens: tuple[int, int], heads: tuple[int, int]
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    shapes = (
        (batch, seqlens[0], heads[0], row.head_dim),
        (batch, seqlens[1], heads[1], row.head_dim),
        (batch, seqlens[1], heads[1], row.head_dim_v),
        (batch, seqlens[0], heads[0], row.head_dim_v),
    )
    return [torch.randn(shape, device="cuda").to(DTYPES[row.dtype]) for shape in shapes]


def offsets(lengths: Iterable[int], device: str = "cuda") -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed_inputs(
    row: rows.TableRow, totals: tuple[int, int], heads: tuple[int, int], padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k and v. The rows behind those of all sequences, `padding` of each, are NaN."""
    made = []
    for total, own, dim in (
        (totals[0], heads[0], row.head_dim),
        (totals[1], heads[1], row.head_dim),
        (totals[1], heads[1], row.head_dim_v),
    ):
        tensor = torch.randn(total + padding, own, dim, device="cuda").to(DTYPES[row.dtype])
        tensor[total:] = math.nan
        made.append(tensor)
    return made[0], made[1], made[2]


def shape_of_bias(kept: str, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    """`[batch, heads, seqlen_q, seqlen_k]`, 1 for what is broadcast: all but the axes b, h, q and k
    that are kept."""
    sizes = {"b": batch, "h": heads, "q": queries, "k": keys}
    return tuple(size if axis in kept else 1 for axis, size in sizes.items())


def results(
    function: Callable[..., Any],
    tensors: list[Tensor],
    learnt: dict[str, Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Output, LSE, and the gradients of q, k, v and of what else is learnt, such as a bias.
    `tensors` are q, k, v and the gradient of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    more = {name: tensor.detach().requires_grad_() for name, tensor in (learnt or {}).items()}
    out, lse = function(*leaves, **more, return_lse=True, **options)
    grads = torch.autograd.grad(out, [*leaves, *more.values()], tensors[3].to(out.dtype))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in more))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def in_float64(
    tensors: list[Tensor], learnt: dict[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    """`results` of the formula."""
    wide = {name: t.double() if name == "bias" else t for name, t in (learnt or {}).items()}
    return results(attention_reference, [t.double() for t in tensors], wide, **options)


def in_pytorch(
    tensors: list[Tensor], learnt: dict[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    """`results` of plain PyTorch in the dtype of the tensors."""

    def plain(*leaves: Tensor, return_lse: bool, **rest: Any) -> tuple[Tensor, Tensor]:
        return plain_pytorch(*leaves, rest)

    return results(plain, tensors, learnt, **options)


def assert_all_as_accurate(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    pytorch: dict[str, Tensor],
    name: str = "",
    factor: float = ACCURACY_FACTOR,
) -> None:
    """Asserts the main rule of `tolerances` for each of `found` but its LSE, which agrees."""
    assert_close(found["lse"], exact["lse"].float(), "large_scores", name="lse")
    for result in [result for result in found if result != "lse"]:
        what = f"{name} {result}"
        # In a row without keys plain PyTorch has NaN, which does not count as its error.
        theirs = pytorch[result].nan_to_num()
        assert_as_accurate(found[result], exact[result], theirs, what, factor)


def check_forward(
    inputs: tuple[Tensor, Tensor, Tensor], backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call without gradients, compared with the formula."""
    out, lse = attention(*inputs, backend=backend, return_lse=True, **options)
    exact, exact_lse = attention_reference(
        *(t.double() for t in inputs), return_lse=True, **options
    )
    assert_as_accurate(out, exact, plain_pytorch(*inputs, options)[0], "out")
    assert_close(lse, exact_lse.float(), "large_scores", name="lse")
    return out, lse


def poison_free_memory() -> None:
    """Fills with NaN what the allocator hands out next, workspaces too."""
    old = [torch.full((2**count,), math.nan, device="cuda") for count in range(8, 25)]
    del old


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Runs a function a few times on a side stream, and records a CUDA graph of it. Returns the
    graph and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
