"""Splits of a decode step: combined by the last of a tile, or by a kernel; lengths that leave some
without keys; streams and graphs, whose counters are their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.inference import attention_with_cache, explain_with_cache
from kernel_calls import poison_free_memory
from paged_calls import Call, Form, check, run, served, skip_unless_served
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

LENGTHS = (2000, 0, 1, 128, 129, 1024, 517, 1999)
# Few rows of a tile and at most 32 splits: the last one combines them on sm90. More rows, or more
# splits: a kernel does.
BY_THE_LAST = ((8, 2), (4, 4), (3, 1))
BY_A_KERNEL = ((64, 1), (40, 2))


def decode(heads: tuple[int, int], splits: int, **changes: Any) -> Call:
    options = {"causal": True, "num_splits": splits, "max_seqlen_k": max(LENGTHS)}
    form = Form(lengths=LENGTHS, queries=(1,) * len(LENGTHS), heads=heads, options=options)
    return Call(replace(form, **changes))


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("heads", [*BY_THE_LAST, *BY_A_KERNEL], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("page_size", [0, 32])
def test_accuracy(
    backend: str, heads: tuple[int, int], dims: tuple[int, int], page_size: int
) -> None:
    """Forced numbers of splits, one after the other: each finds its counters at zero. What splits
    without keys leave in the workspace is NaN."""
    for splits in (2, 16, 3, 8, 40, 128, 2):
        call = decode(heads, splits, dims=dims, page_size=page_size)
        skip_unless_served(call.given, backend)
        poison_free_memory()
        check(call, backend)


@pytest.mark.parametrize("heads", BY_THE_LAST, ids=str)
@pytest.mark.parametrize("splits", [2, 7, 8, 9, 16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_whoever_combines_them_the_bits_are_the_same(
    heads: tuple[int, int], splits: int, dims: tuple[int, int]
) -> None:
    """Of packed queries a kernel combines them. Which split is the last differs from run to run."""
    dense = decode(heads, splits, dims=dims)
    skip_unless_served(dense.given, "sm90")
    wanted = run(decode(heads, splits, dims=dims, packed=True), "sm90")
    for _ in range(30):
        for one, other, name in zip(run(dense, "sm90"), wanted, ("out", "lse"), strict=True):
            assert_same_bits(one, other, name)


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("changes", [{}, {"packed": True}, {"page_size": 32}], ids=str)
def test_as_many_splits_as_explained(backend: str, changes: dict[str, Any]) -> None:
    """Another number of splits gives other bits."""
    torch.manual_seed(0)
    open_call = decode((4, 1), 0, lengths=(2000,), queries=(1,), **changes)
    skip_unless_served(open_call.given, backend)
    explained = explain_with_cache(**open_call.given, backend=backend)
    (splits,) = (
        row.num_splits
        for report in explained.forward
        for row in report.rows
        if row.chosen and report.backend == backend
    )
    assert splits > 1

    def with_splits(number: int) -> Tensor:
        return attention_with_cache(**open_call.given | {"num_splits": number}, backend=backend)

    out = with_splits(0)
    assert_same_bits(out, with_splits(splits), "out")
    assert not torch.equal(out, with_splits(splits // 2))
    promised = open_call.given | {"batch_invariant": True, "num_splits": 5}
    assert "splits of the keys" not in str(explain_with_cache(**promised, backend=backend))


@pytest.mark.parametrize("name", ["sink", "softcap", "alibi_slopes", "window"])
def test_what_joins_once(name: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "sink": {"sink": torch.randn(8)},
        "softcap": {"softcap": 20.0},
        "alibi_slopes": {"alibi_slopes": torch.rand(8)},
        "window": {"window": (700, 0)},
    }[name]
    for queries in (1, 3):
        form = Form(
            lengths=LENGTHS, queries=(queries,) * len(LENGTHS),
            options={"causal": name != "window", "num_splits": 5, **options},
        )  # fmt: skip
        check(served(form, "sm90"), "sm90")


def test_more_tiles_than_counters() -> None:
    """A call with more tiles than a stream has counters for."""
    form = Form(lengths=(300,) * 150, queries=(1,) * 150, heads=(8, 8), options={"num_splits": 2})
    check(served(form, "sm90"), "sm90")


def test_streams_have_counters_of_their_own() -> None:
    """Calls of many streams at a time, of different numbers of splits."""
    calls = [decode((8, 2), splits) for splits in (2, 5, 16, 7)]
    skip_unless_served(calls[0].given, "sm90")
    wanted = [run(call, "sm90") for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[tuple[int, tuple[Tensor, Tensor]]] = []
    for turn in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                which = (index + turn) % len(calls)
                found.append((which, run(calls[which], "sm90")))
    torch.cuda.synchronize()
    for which, results in found:
        for one, other in zip(results, wanted[which], strict=True):
            assert_same_bits(one, other, f"call {which}")


def test_graphs_at_the_same_time() -> None:
    """Two graphs, captured in one stream, replayed in two, beside calls without a graph."""
    calls = [decode((8, 2), splits) for splits in (16, 9)]
    skip_unless_served(calls[0].given, "sm90")
    wanted = [run(call, "sm90") for call in calls]
    torch.cuda.synchronize()
    graphs, captured = [], []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention_with_cache(**call.given, backend="sm90")
        graphs.append(graph)
        captured.append(out)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        for out in captured:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    graph.replay()
        eager = run(calls[0], "sm90")
        torch.cuda.synchronize()
        assert_same_bits(eager[0], wanted[0][0], "beside the graphs")
        for out, want in zip(captured, wanted, strict=True):
            assert_same_bits(out.flatten(0, 1), want[0], "replayed")
