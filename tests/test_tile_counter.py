"""Causal calls of more tiles of queries than the GPU has SMs: sm90 CTAs take them from a counter.
Each tile is computed once, whoever takes it, and each call finds the counter at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.inference import attention_with_cache
from cute_attention.native import rows
from every_row import (
    ALL,
    DTYPES,
    fixture_of,
    options_of,
    skip_unless_it_is_chosen,
)
from kernel_calls import poison_free_memory
from paged_calls import Form, check, served
from paged_calls import run as run_cached
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu
row = fixture_of(
    [row for row in ALL if row.arch == "sm90" and row.direction == "forward"],
    skip_unless_it_is_chosen,
)

SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # queries, keys, options
    "square": (385, 385, {"causal": True}),
    "more keys": (260, 700, {"causal": True}),
    "queries without keys": (700, 260, {"causal": True}),
    "window": (520, 520, {"window": (100, 0)}),
}


def draw(
    dims: tuple[int, int], dtype: torch.dtype, seqlens: tuple[int, int], group: int = 1
) -> list[Tensor]:
    """q, k and v of two sequences, of more than twice as many tiles as there are SMs."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    heads_kv = sms // (-(-seqlens[0] // 192) * group) + 2
    shapes = (seqlens[0], heads_kv * group), (seqlens[1], heads_kv), (seqlens[1], heads_kv)
    sizes = dims[0], *dims
    return [
        torch.randn(2, *shape, size, device="cuda", dtype=dtype)
        for shape, size in zip(shapes, sizes, strict=True)
    ]


def run(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    poison_free_memory()
    return list(attention(*tensors, **options, return_lse=True, backend="sm90"))


def packed(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The same as packed sequences, whose tiles come in another order and from another counter."""
    batch, seqlen_q, heads = tensors[0].shape[:3]
    seqlen_k = tensors[1].shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = starts * seqlen_q, starts * seqlen_k, seqlen_q, seqlen_k
    rows = (tensor.flatten(0, 1) for tensor in tensors)
    poison_free_memory()
    out, lse = attention_varlen(*rows, *lengths, **options, return_lse=True, backend="sm90")
    return [out.view(batch, seqlen_q, heads, -1), lse.view(heads, batch, seqlen_q).transpose(0, 1)]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tile_is_computed(
    row: rows.TableRow, shape: tuple[int, int, dict[str, Any]], group: int
) -> None:
    *seqlens, given = shape
    tensors = draw((row.head_dim, row.head_dim_v), DTYPES[row.dtype], (*seqlens,), group)
    options = options_of(row, given, tensors[0].shape[2])
    wanted = packed(tensors, options)
    for time in ("first", "second", "third"):  # the counter is at zero again
        for found, want, name in zip(run(tensors, options), wanted, ("out", "lse"), strict=True):
            assert_same_bits(found, want, f"{name} of the {time} call")


CAUSAL = {"causal": True}


def of_lengths(seqlens: tuple[int, ...]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Inputs of calls of different numbers of tiles, and what each gives when packed."""
    calls = [draw((64, 64), torch.bfloat16, (seqlen, seqlen)) for seqlen in seqlens]
    return calls, [packed(call, CAUSAL) for call in calls]


def skip_unless_there_is_sm90() -> None:
    served(Form(lengths=(300,), queries=(1,)), "sm90")  # skips where it is not


def test_streams_have_counters_of_their_own() -> None:
    skip_unless_there_is_sm90()
    calls, wanted = of_lengths((385, 700, 520, 2000))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found = []
    for turn in range(10):
        for index, stream in enumerate(streams):
            which = (index + turn) % len(calls)
            with torch.cuda.stream(stream):
                found.append((which, run(calls[which], CAUSAL)))
    torch.cuda.synchronize()
    for which, results in found:
        for one, other in zip(results, wanted[which], strict=True):
            assert_same_bits(one, other, f"call {which}")


def test_graphs_at_the_same_time() -> None:
    """Graphs that were captured in one stream, replayed in two, beside calls without a graph."""
    skip_unless_there_is_sm90()
    calls, wanted = of_lengths((700, 2000))
    run(calls[0], CAUSAL)  # loads the counters
    graphs, captured = [], []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append(attention(*call, **CAUSAL, backend="sm90"))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for out in captured:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    graph.replay()
        eager = run(calls[0], CAUSAL)
        torch.cuda.synchronize()
        assert_same_bits(eager[0], wanted[0][0], "beside the graphs")
        for out, want in zip(captured, wanted, strict=True):
            assert_same_bits(out, want[0], "replayed")


def test_splits_of_the_same_stream_count_in_the_same_memory() -> None:
    """A causal call, a step of decoding whose last splits combine them, and the other way round."""
    form = Form(lengths=(2000,) * 8, queries=(1,) * 8, options={"num_splits": 8, "causal": True})
    step = served(form, "sm90")
    calls, wanted = of_lengths((700,))
    wanted_step = attention_with_cache(**step.given, backend="sm90")
    for _ in range(10):
        first = run(calls[0], CAUSAL)
        decoded = attention_with_cache(**step.given, backend="sm90")
        assert_same_bits(first[0], wanted[0][0], "the causal call")
        assert_same_bits(decoded, wanted_step, "the step")


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("queries", [1, 150])
def test_sequences_of_a_cache(page_size: int, queries: int) -> None:
    """Lengths of 0 to 400 tokens, of which some sequences have no tile with keys; three calls, of
    which each finds the counter at zero. The bits are those of a sequence of the batch alone, which
    has too few tiles for the counter."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = tuple((0, 400, 1, 130, 256, 17)[b % 6] for b in range(sms // 2 + 7))
    form = Form(page_size, lengths, (queries,) * len(lengths), options={"num_splits": 1})
    call = served(form, "sm90")
    out, lse = check(call, "sm90")
    for _ in range(2):
        again = run_cached(call, "sm90")
        assert_same_bits(again[0], out, "again")
        assert_same_bits(again[1], lse, "again")
    for b in (1, 3, len(lengths) - 1):
        alone = dict(call.given, q=call.given["q"][b : b + 1])
        alone["cache_seqlens"] = call.given["cache_seqlens"][b : b + 1]
        alone["cache_batch_idx"] = torch.tensor([b], dtype=torch.int32, device="cuda")
        of_one = attention_with_cache(**alone, backend="sm90")
        assert_same_bits(of_one[0], out[b * queries : (b + 1) * queries], f"sequence {b} alone")
