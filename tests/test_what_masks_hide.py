"""What lies in rows that a mask hides, of the reference backend and of each row of the tables.

Finite numbers there change nothing, bit by bit: keys that no query sees, and queries that see no
key. NaN and infinities may reach other rows of their sequence, but no other sequence, and no query
of another KV head. (`test_neighbours.py` has packed sequences, `test_bias.py` the bias.)"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.bench.roundings import NAMES, visible
from cute_attention.inference import attention_with_cache
from cute_attention.inference.checked import checked_cache
from cute_attention.inference.lowered import lowered_forward
from cute_attention.inference.options import with_defaults
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_it_is_chosen
from kernel_calls import options_for

row = fixture_of(ALL, skip_unless_it_is_chosen)
HEADS, HEADS_KV = 6, 2
ON_CPU = torch.float32, 16, 24, "cpu"
# (queries, keys), and a mask that hides whole rows: keys before the first window, queries before
# the first key, or both sides of the mask within one tile.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "keys before a window": (70, 300, {"causal": True, "window": (40, None)}),
    "one query in a window": (1, 300, {"window": (40, None)}),
    "queries before the keys": (150, 60, {"causal": True}),
    "queries before a window": (150, 60, {"window": (9, 3)}),
}


def inputs(case: str, where: tuple[Any, ...]) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    queries, keys, _ = CASES[case]
    dtype, dim, dim_v, device = where
    torch.manual_seed(0)
    shapes = (
        (2, queries, HEADS, dim), (2, keys, HEADS_KV, dim), (2, keys, HEADS_KV, dim_v),
        (2, queries, HEADS, dim_v),
    )  # fmt: skip
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def results(case: str, tensors: list[Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    own = {**options, **CASES[case][2], "return_lse": True, "deterministic": True}
    out, lse = attention(*leaves, **own)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check_finite(case: str, options: dict[str, Any], where: tuple[Any, ...]) -> None:
    queries, keys, mask = CASES[case]
    tensors = inputs(case, where)
    sees = visible(queries, keys, mask.get("causal", False), mask.get("window"))
    blind, unseen = (~sees.any(1)).nonzero()[:, 0], (~sees.any(0)).nonzero()[:, 0]
    assert len(blind) + len(unseen)
    changed = [t.clone() for t in tensors]
    for value, hidden in zip(changed, (blind, unseen, unseen, blind), strict=True):
        value[:, hidden.to(value.device)] *= 1000.0
    found, expected = (results(case, each, options) for each in (changed, tensors))
    for name in NAMES:
        assert torch.equal(found[name], expected[name]), name


def check_nan(case: str, options: dict[str, Any], where: tuple[Any, ...]) -> None:
    """All of the second sequence, and then all of the second KV head."""
    tensors = inputs(case, where)
    expected = results(case, tensors, options)
    for bad in (math.nan, math.inf):
        changed = [t.clone() for t in tensors]
        for value in changed:
            value[1] = bad
        found = results(case, changed, options)
        for name in NAMES:
            assert torch.equal(found[name][0], expected[name][0]), f"{name} beside {bad}"
        changed = [t.clone() for t in tensors]
        for value in changed:
            value[:, :, value.shape[2] // 2 :] = bad
        found = results(case, changed, options)
        for name in NAMES:
            axis = 1 if name == "lse" else 2
            one, other = (
                t.narrow(axis, 0, t.shape[axis] // 2) for t in (found[name], expected[name])
            )
            assert torch.equal(one, other), f"{name} of a head beside {bad}"


@pytest.mark.parametrize("case", CASES)
def test_reference(case: str) -> None:
    check_finite(case, {"backend": "reference"}, ON_CPU)
    check_nan(case, {"backend": "reference"}, ON_CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_finite_numbers_of_hidden_rows(row: Any, case: str) -> None:
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    check_finite(case, options, (DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_nan_stays_in_its_sequence_and_head(row: Any, case: str) -> None:
    options = options_for(row, {"backend": backend_of(row)}, HEADS)
    check_nan(case, options, (DTYPES[row.dtype], row.head_dim, row.head_dim_v, "cuda"))


def cache_with_nan(
    length: int, first: int, paged: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A call with a cache of pages of 16 tokens whose pages before that of token `first` are NaN,
    and the same call with zeros there. Not `paged`: the memory behind the tokens is NaN."""
    torch.manual_seed(0)
    page = 16
    count = -(-length // page)
    calls = []
    for bad in (math.nan, 0.0):
        torch.manual_seed(1)
        k_cache, v_cache = (torch.randn(count, page, HEADS_KV, 64).to(dtype) for _ in range(2))
        given = {
            "q": torch.randn(1, 3, HEADS, 64).to(dtype),
            "k_cache": k_cache,
            "v_cache": v_cache,
        }
        given["cache_seqlens"] = torch.tensor([length], dtype=torch.int32)
        for cache in (k_cache, v_cache):
            if paged:
                cache[: first // page] = bad
            else:
                cache.flatten(0, 1)[length:] = bad
        if paged:
            given["block_table"] = torch.arange(count, dtype=torch.int32)[None]
        else:
            given |= {name: given[name].flatten(0, 1)[None] for name in ("k_cache", "v_cache")}
        calls.append({name: value.to(device) for name, value in given.items()})
    return calls[0], calls[1]


# Tokens, options, the first token that a query sees, whether pages before it or rows behind all
# tokens are NaN.
CACHES: dict[str, tuple[int, dict[str, Any], int, bool]] = {
    "window": (300, {"causal": True, "window": (40, 0)}, 257, True),
    "chunk": (300, {"causal": True, "attention_chunk": 64}, 256, True),
    "chunk begins in these queries": (258, {"causal": True, "attention_chunk": 64}, 192, True),
    "window in a chunk": (300, {"window": (20, 0), "attention_chunk": 128}, 277, True),
    "rows behind": (300, {"causal": True}, 0, False),
    "rows behind a chunk": (300, {"causal": True, "attention_chunk": 64}, 256, False),
}


@pytest.mark.parametrize("case", CACHES)
def test_caches_on_the_reference(case: str) -> None:
    """Read in place, and as packed sequences, as they are where no kernel reads them in place."""
    length, options, first, paged = CACHES[case]
    calls = cache_with_nan(length, first, paged)
    found, expected = (attention_with_cache(**given, **options) for given in calls)
    assert torch.equal(found, expected) and found.isfinite().all()
    packed = [
        lowered_forward(
            checked_cache(
                *(given[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")),
                with_defaults("", {**options, "block_table": given.get("block_table"),
                                   "backend": "reference"}),
            )
        )[0]
        for given in calls
    ]  # fmt: skip
    assert torch.equal(packed[0], packed[1])
    torch.testing.assert_close(packed[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CACHES)
def test_caches_on_kernels(case: str) -> None:
    length, options, first, paged = CACHES[case]
    calls = cache_with_nan(length, first, paged, "cuda", torch.bfloat16)
    found, expected = (attention_with_cache(**given, **options) for given in calls)
    assert torch.equal(found, expected) and found.isfinite().all()
