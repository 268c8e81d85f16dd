"""Forward kernels with columns for study, on a GPU: right by the float64 rule where their choices
matter: at every number of KV tiles, where maxima rise, with NaN behind sequences, in large grids.

CUTE_ATTENTION_BUILT names a folder with their libraries, as in test_rows_gpu.py, which checks the
same kernels, and those of the backward, in ordinary calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import kernel_cache
from cute_attention.rows import Kernel, load_library, use
from cute_attention.semantics.formula import attention_reference
from every_row import DTYPES
from kernel_calls import plain_pytorch
from test_rows_gpu import BUILT, kernel_called, skip_unless_it_runs_here
from tolerances import assert_as_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not BUILT, reason="CUTE_ATTENTION_BUILT names no folder with libraries"),
]

FORWARD = [path for path in BUILT if "_fwd_" in path.name]


@pytest.fixture(params=FORWARD, ids=lambda path: path.stem)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """A kernel that this GPU runs."""
    path: Path = request.param
    load_library(path, on_request=True)
    found = kernel_called(path.stem.removeprefix(kernel_cache.PLUG_IN))
    skip_unless_it_runs_here(found)
    if found.score_mods:
        pytest.skip("its calls need arguments of their own")
    return found


def tensors(
    kernel: Kernel, batch: int, seqlen_q: int, seqlen_k: int, heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the kernel's own head dims; two query heads share one of k and v."""
    torch.manual_seed(seqlen_k)
    options: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[kernel.dtype]}
    q = torch.randn(batch, seqlen_q, heads, kernel.head_dim, **options)
    k = torch.randn(batch, seqlen_k, heads // 2, kernel.head_dim, **options)
    v = torch.randn(batch, seqlen_k, heads // 2, kernel.head_dim_v, **options)
    return q, k, v


def check(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, name: str, **options: Any) -> None:
    with use(kernel):
        out = attention(q, k, v, **options)
    exact = attention_reference(q.double(), k.double(), v.double(), **options)
    assert isinstance(exact, Tensor)
    plain, _ = plain_pytorch(q, k, v, options)
    assert_as_accurate(out, exact, plain, name)


def lengths(kernel: Kernel) -> Iterator[int]:
    """Keys of one to five tiles: whole ones, and the last with one key, or with all but one."""
    for tiles in range(1, 6):
        yield from (
            (tiles - 1) * kernel.tile_n + 1,
            tiles * kernel.tile_n - 1,
            tiles * kernel.tile_n,
        )


def test_every_number_of_kv_tiles(kernel):
    for keys in lengths(kernel):
        for queries, options in (
            (1, {}),
            (kernel.tile_m + 1, {}),
            (keys, {"causal": True}),
        ):
            q, k, v = tensors(kernel, 2, queries, keys)
            check(kernel, q, k, v, f"{queries} x {keys} {options}", **options)


def test_a_walk_that_begins_and_ends_inside(kernel):
    """A window hides whole tiles at both ends."""
    keys = 6 * kernel.tile_n + 3
    q, k, v = tensors(kernel, 1, keys, keys)
    for window in ((kernel.tile_n + 5, 7), (3, 2 * kernel.tile_n), (0, 0)):
        check(kernel, q, k, v, f"window {window}", window=window)


def test_maxima_that_rise_and_fall(kernel):
    """KV tiles are visited from the last to the first: keys that grow towards the front raise the
    maximum in every tile, by more than a reference may lag behind; others never raise it."""
    keys = 8 * kernel.tile_n
    q, k, v = tensors(kernel, 1, 70, keys)
    place = torch.arange(keys, device="cuda") // kernel.tile_n
    towards = torch.ones_like(q[:, :1, :1]) / math.sqrt(kernel.head_dim)
    for name, steps in (("rise", 7 - place), ("fall", place), ("alternate", place % 2 * 7)):
        growing = (k + 12 * steps[None, :, None, None] * towards).to(k.dtype)
        check(kernel, q + 12 * towards, growing, v, name)


def test_no_keys_and_no_queries(kernel):
    q, k, v = tensors(kernel, 2, 5, 0)
    with use(kernel):
        out, lse = attention(q, k, v, return_lse=True)
        empty = attention(q[:, :0], k, v)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert empty.shape == (2, 0, 2, kernel.head_dim_v)


def test_packed_sequences_with_nan_behind_them(kernel):
    """The rows behind a sequence are those of the next one, which are NaN in one of two cases."""
    queries = (70, 0, kernel.tile_m + 3, 1, 40)
    keys = (2 * kernel.tile_n + 1, 4, kernel.tile_n - 2, 3 * kernel.tile_n - 1, 0)
    q, k, v = (t[0] for t in tensors(kernel, 1, sum(queries) + 9, sum(keys) + 9))
    for tensor, rows in ((q, sum(queries)), (k, sum(keys)), (v, sum(keys))):
        tensor[rows:] = math.nan
    starts = [(0, *itertools.accumulate(counts)) for counts in (queries, keys)]
    cu_q, cu_k = (torch.tensor(each, device="cuda", dtype=torch.int32) for each in starts)
    for poisoned in (False, True):
        if poisoned:  # every other sequence
            for i in (1, 3):
                k[starts[1][i] : starts[1][i + 1]] = math.nan
                v[starts[1][i] : starts[1][i + 1]] = math.nan
        for causal in (False, True):
            with use(kernel):
                out = attention_varlen(q, k, v, cu_q, cu_k, max(queries), max(keys), causal=causal)
            for i in range(len(queries)):
                if poisoned and i in (1, 3):
                    continue
                own = slice(starts[0][i], starts[0][i + 1])
                theirs = slice(starts[1][i], starts[1][i + 1])
                if own.start == own.stop:
                    continue
                if theirs.start == theirs.stop:
                    assert (out[own] == 0).all()
                    continue
                parts = q[own][None], k[theirs][None], v[theirs][None]
                exact = attention_reference(*(t.double() for t in parts), causal=causal)
                plain, _ = plain_pytorch(*parts, {"causal": causal})
                assert isinstance(exact, Tensor)
                assert_as_accurate(out[own][None], exact, plain, f"sequence {i}, {poisoned=}")


def test_more_tiles_than_multiprocessors(kernel):
    """Every CTA of a persistent grid computes several tiles, every other CTA one."""
    tiles = 3 * torch.cuda.get_device_properties(0).multi_processor_count + 1
    batch = -(-tiles // 8)
    q, k, v = tensors(kernel, batch, 2 * kernel.tile_m - 1, kernel.tile_n + 1, heads=4)
    check(kernel, q, k, v, "full")
    check(kernel, q, k, v, "causal", causal=True)


def test_the_same_bits_from_a_graph_on_another_stream(kernel):
    q, k, v = tensors(kernel, 2, 100, 300)
    with use(kernel):
        expected = attention(q, k, v)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attention(q, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
