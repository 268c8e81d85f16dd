"""Kernels that read a cache where it lies: pages of many sizes, lengths on the device, poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.inference import attention_with_cache, explain_with_cache
from paged_calls import Call, Form, check, refill, run, served, skip_unless_served
from tolerances import assert_close, assert_same_bits

PAGES = [16, 32, 48, 64, 80, 256, 1024]
# 0, 1, and around the edges of pages and tiles.
LENGTHS = (0, 1, 15, 16, 17, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 500, 1023, 1024, 1100)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 0)},
    "band": {"window": (100, 3)},
    "left": {"window": (5, None)},
}
BACKENDS = ["sm90", "sm80"]


def test_the_helper_on_the_reference_backend() -> None:
    """The same calls on a CPU: what the tests below expect is what the reference returns."""
    for mask in MASKS.values():
        for changes in (
            {"page_size": 16, "shared": 40}, {"leftpad": (0, 1, 3, 70, 2, 1, 400)},
            {"page_size": 48, "packed": True, "queries": (1, 5, 0, 70, 3, 1, 2), "batch_idx": True},
        ):  # fmt: skip
            lengths = (40, 0, 17, 64, 65, 1, 300)
            form = Form(
                lengths=lengths, heads=(4, 2), dims=(32, 16), options=mask, dtype=torch.float32,
                **{"queries": (3,) * 7, **changes},
            )  # fmt: skip
            call = Call(form, "cpu")
            out, lse = run(call, "reference")
            exact, exact_lse, plain = call.expected()
            assert_close(out.double(), exact, "rounding", torch.float32)
            assert_close(lse.double(), exact_lse, "rounding", torch.float32, "lse")
            assert_close(plain, out, "rounding")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_pages_of_any_size_and_contiguous_caches(
    backend: str, mask: str, dims: tuple[int, int]
) -> None:
    """Decoding: wherever the tokens lie, the bits are those of a contiguous cache."""
    options = {**MASKS[mask], "max_seqlen_k": max(LENGTHS)}
    form = Form(lengths=LENGTHS, queries=(1,), dims=dims, options=options)
    contiguous = served(form, backend)
    wanted = check(contiguous, backend)
    for page_size in PAGES:
        found = run(Call(replace(form, page_size=page_size)), backend)
        for one, other, name in zip(found, wanted, ("out", "lse"), strict=True):
            assert_same_bits(one, other, f"{name}, pages of {page_size}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [0, 16, 48, 256])
def test_packed_queries(backend: str, mask: str, page_size: int) -> None:
    """Prompts and decoding in one call; sequences without queries, queries without keys."""
    form = Form(
        page_size=page_size, packed=True, batch_idx=True, options=MASKS[mask],
        lengths=(300, 0, 17, 640, 64, 129, 1, 1000), queries=(150, 3, 17, 1, 0, 129, 4, 1),
    )  # fmt: skip
    check(served(form, backend), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (6, 2), (40, 8)], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 130])
def test_heads(backend: str, heads: tuple[int, int], queries: int) -> None:
    form = Form(
        page_size=32, lengths=(5, 130, 700), queries=(queries,), heads=heads,
        options={"causal": True}, dtype=torch.float16,
    )  # fmt: skip
    check(served(form, backend), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["softcap", "alibi_slopes", "sink"])
def test_what_joins_the_scores(backend: str, name: str) -> None:
    torch.manual_seed(0)
    options = {
        "softcap": {"softcap": 20.0},
        "alibi_slopes": {"alibi_slopes": torch.rand(8)},
        "sink": {"sink": torch.randn(8)},
    }[name]
    for page_size in (0, 16, 80):
        form = Form(
            page_size=page_size, lengths=(0, 77, 400), queries=(9,),
            options={**options, "causal": True},
        )  # fmt: skip
        check(served(form, backend), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_in_front(backend: str) -> None:
    """The padding is NaN, and a sequence may be all padding."""
    form = Form(
        lengths=(300, 40, 40, 129, 1), leftpad=(17, 39, 40, 128, 500), queries=(2,),
        batch_idx=True, options={"causal": True},
    )  # fmt: skip
    check(served(form, backend), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_shared_pages(backend: str, page_size: int) -> None:
    call = served(
        Form(page_size=page_size, lengths=(500, 333, 128, 40), shared=256, queries=(1,)), backend
    )
    table = call.given["block_table"]
    assert int(table[0, 0]) == int(table[1, 0]) == int(table[2, 0])
    check(call, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_more_tokens_than_there_is_room_for(backend: str, page_size: int) -> None:
    """Nothing is read that does not exist: the other sequences are right."""
    form = Form(page_size=page_size, lengths=(64, 64, 64), room=64, queries=(1,))
    call = served(form, backend)
    wanted, _ = check(call, backend)
    lengths = torch.tensor([2**31 - 1, 64, -5], dtype=torch.int32, device="cuda")
    out, lse = run(call, backend, cache_seqlens=lengths)
    assert_same_bits(out[1:2], wanted[1:2], "out")
    assert not out[2].any(), "no tokens"
    assert (lse[:, 2] == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_do_not_exist(backend: str) -> None:
    """A wrong entry that is needed: the row is anything, but nothing crashes, and the other
    sequences are right."""
    call = served(Form(page_size=16, lengths=(100, 100), queries=(1,)), backend)
    wanted, _ = check(call, backend)
    for entry in (-1, 2**31 - 1, call.given["k_cache"].shape[0]):
        call.given["block_table"][0, 2] = entry
        out, _ = run(call, backend)
        assert_same_bits(out[1], wanted[1], "out")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [0, 32])
@pytest.mark.parametrize("packed", [False, True])
def test_graphs_see_other_lengths(backend: str, page_size: int, packed: bool) -> None:
    """A graph is replayed with other lengths, tables, rows and tokens."""
    form = Form(
        page_size=page_size, lengths=(300, 1, 64, 512), queries=(1, 1, 1, 1), packed=packed,
        batch_idx=True, room=640, options={"causal": True},
    )  # fmt: skip
    call = served(form, backend)
    # As many pages as any of the calls below has.
    others = [Call(replace(form, lengths=n)) for n in ((512, 512, 512, 640), (0, 17, 0, 640))]
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in others[0].given.items()}
    run(call, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_cache(**given, backend=backend, return_lse=True)
    for other in (call, *others, call):
        refill(given, other.given)
        graph.replay()
        found = other.flat(out, lse)
        for one, want, name in zip(found, run(other, backend), ("out", "lse"), strict=True):
            assert_same_bits(one, want, name)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_appending_and_reading_in_one_call(backend: str) -> None:
    """What is appended is read by the same call, and a page is filled to its edge."""
    call = served(Form(page_size=16, lengths=(15, 16, 130, 0), room=160, queries=(1,)), backend)
    table = call.given["block_table"]
    pages = torch.randperm(table.numel()).int().view_as(table).to("cuda")
    shape = table.numel(), 16, 2, 128
    caches = {name: torch.randn(shape, device="cuda").bfloat16() for name in ("k_cache", "v_cache")}
    k, v = torch.randn(2, 4, 1, 2, 128, device="cuda").bfloat16().unbind()
    given = {**call.given, **caches, "block_table": pages, "k": k, "v": v, "causal": True}
    copies = {name: cache.clone() for name, cache in caches.items()}
    out = attention_with_cache(**given, backend=backend)
    wanted = attention_with_cache(**{**given, **copies}, backend="reference")
    for name, cache in copies.items():
        assert_same_bits(caches[name], cache, name)
    assert_close(out.double(), wanted.double(), "stored", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams(backend: str) -> None:
    """Two streams at a time, with caches of their own."""
    calls = [Call(Form(page_size=16, lengths=(n, 900), queries=(1,))) for n in (100, 700)]
    skip_unless_served(calls[0].given, backend)
    wanted = [run(call, backend) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(5):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(call, backend))
    torch.cuda.synchronize()
    for index, results in enumerate(found):
        assert_same_bits(results[0], wanted[index % 2][0], "out")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("cache_seqlens", lambda t: t.long(), "seqused_k must be a contiguous int32 tensor"),
        ("cache_seqlens", lambda t: t[:-1], "seqused_k must be a contiguous int32 tensor"),
        ("block_table", lambda t: t[0], "block_table must be an int32 tensor"),
        ("block_table", lambda t: t[:1], "block_table must be an int32 tensor"),
        ("block_table", lambda t: t.cpu(), "block_table must be an int32 tensor"),
        ("v_cache", lambda t: t[:, :8], "the shapes of q, k and v do not match"),
        ("k_cache", lambda t: t.float(), "must all be float16 or all bfloat16"),
        ("options", lambda text: text[:-2], "turns_each_query"),
        ("k_cache", lambda t: t[0], "q must have 4 dimensions, k and v of a cache 4"),
    ],
)
def test_the_op_refuses(name: str, wrong: Any, message: str) -> None:
    """What `attention_with_cache` never passes on."""
    call = Call(Form(page_size=16))
    explanation = explain_with_cache(**call.given)
    assert explanation.chosen in BACKENDS, str(explanation)
    run(call, explanation.chosen)  # loads the binding
    given = call.given
    arguments = {
        "q": given["q"], "k_cache": given["k_cache"], "v_cache": given["v_cache"],
        "cache_seqlens": given["cache_seqlens"],
        "options": f"{explanation.chosen} 0.1 -1 -1 0.0 0 0 1 0",
        "block_table": given["block_table"],
    }  # fmt: skip
    ops = torch.ops.cute_attention.attend_cache, torch.ops.cute_attention.brief_attend_cache
    for op in ops:
        op(**arguments)
    arguments[name] = wrong(arguments[name])
    for op in ops:
        with pytest.raises(RuntimeError, match=message):
            op(**arguments)
