"""Latent attention (MLA) in its absorbed form: which calls its kernel serves, what it computes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import flash_attn_interface
from cute_attention.cache_arguments import CACHE, QV, CacheArguments
from cute_attention.inference import attention_with_cache, choice, explain_with_cache, latent
from cute_attention.inference.in_place import obstacle
from cute_attention.inference.lowered import lowered_forward
from cute_attention.integrations.flash_attn.kvcache import _copies_pages
from latent_calls import LATENT, ROPE, latent_call, latent_form, with_qv
from paged_calls import Call, Form, check, refill, skip_unless_served
from test_cache_in_place import stand_in  # noqa: F401  (a fixture)
from tolerances import assert_close, assert_same_bits

LENGTHS = (0, 1, 63, 64, 65, 130, 4096)
PAGES = [16, 48, 64, 256]
gpu = pytest.mark.gpu


def checked(given: dict[str, Any]) -> CacheArguments:
    """The checked arguments of a call, for the sm80 kernel whose place a stand-in takes."""
    options = dict(given)
    tensors = [options.pop(name) for name in ("q", "k_cache", "v_cache", "cache_seqlens")]
    options = choice.with_defaults("attention_with_cache", options)
    return choice.checked_cache(*tensors, options)._replace(backend="sm80")


def small(**changes: Any) -> Form:
    """Small enough for a CPU, and wider than the widest kernels without qv."""
    changes = {"lengths": (0, 5, 64, 70), "heads": 4, "queries": 2, **changes}
    return latent_form(dims=(8, 256), dtype=torch.float32, **changes)


# ---- which calls are recognised


def test_both_forms_ask_for_a_kernel_that_reads_qv() -> None:
    call = latent_call(small(page_size=16), "cpu")
    for given in (call.given, with_qv(call), with_qv(call, apart=True)):
        kind = choice._kind(checked(given))
        assert (kind.head_dim, kind.head_dim_v, kind.features) == (8, 256, CACHE | QV)
        assert obstacle(checked(given)) == ""


def others() -> dict[str, dict[str, Any]]:
    """Calls that are like those, but that no kernel with qv serves."""
    call = latent_call(small(page_size=16), "cpu")
    given, cache = call.given, call.given["k_cache"]
    return {
        "values of their own": {**given, "v_cache": given["v_cache"].contiguous()},
        "the last columns": {**given, "v_cache": cache[..., 8:]},
        "values of the next tokens": {**given, "v_cache": cache[..., :256].roll(1, 1)},
        "half of the rows": {
            **given, "k_cache": cache[:, ::2], "v_cache": cache[:, :8, :, :256],
        },
        "all columns": {**given, "v_cache": cache},
        "chunks": {**given, "attention_chunk": 16},
        "pages of 24": latent_call(small(page_size=24), "cpu").given,
        "chunks, with qv": {**with_qv(call), "attention_chunk": 16},
    }  # fmt: skip


@pytest.mark.parametrize("name", others())
def test_others_are_not(name: str) -> None:
    """They ask for kernels with all columns, of which there are none, and so run on the
    reference."""
    kind = choice._kind(checked(others()[name]))
    assert not kind.features & QV
    assert kind.head_dim == 264 > latent.WIDEST


def test_narrow_calls_stay_as_they_were() -> None:
    """Kernels serve all of their columns: those in one tensor where they lie, qv beside each
    other."""
    call = latent_call(replace(small(), dims=(8, 128)), "cpu")
    for given, way in ((call.given, ""), (with_qv(call), "qv")):
        kind = choice._kind(checked(given))
        assert (kind.head_dim, kind.head_dim_v) == (136, 128)
        assert kind.features == (0 if way else CACHE)
        assert obstacle(checked(given)) == way


def test_explain() -> None:
    call = latent_call(small(), "cpu")
    assert "values in k_cache" in str(explain_with_cache(**call.given))
    assert "qv" in str(explain_with_cache(**with_qv(call)))
    apart = {**call.given, "v_cache": call.given["v_cache"].contiguous()}
    assert "values in k_cache" not in str(explain_with_cache(**apart))


@pytest.mark.parametrize("form", ["one tensor", "qv"])
def test_compiled_calls(form: str) -> None:
    """In one graph: who shares memory is not looked at there."""
    call = latent_call(small(page_size=16), "cpu")
    given = call.given if form == "one tensor" else with_qv(call)
    compiled = torch.compile(attention_with_cache, backend="eager", fullgraph=True)
    for found, wanted in zip(
        compiled(**given, return_lse=True),
        attention_with_cache(**given, return_lse=True),
        strict=True,
    ):
        assert_same_bits(found, wanted, form)


def test_the_example_of_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs/mla.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].shape == (4, 1, 128, 512)


# ---- what the kernel is given, which a stand-in computes on the CPU


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_results(page_size: int, packed: bool, stand_in: list[dict[str, Any]]) -> None:  # noqa: F811
    changes = {"page_size": page_size, "packed": packed, "batch_idx": True}
    form = replace(small(**changes), queries=(1, 3, 0, 2) if packed else (2,))
    call = latent_call(form, "cpu")
    exact, exact_lse, _ = call.expected()
    for given in (call.given, with_qv(call), with_qv(call, apart=True)):
        for found in (
            lowered_forward(checked(given)),
            attention_with_cache(**given, return_lse=True),  # the reference
        ):
            out, lse = call.flat(*found)
            assert_close(out.double(), exact, "rounding", torch.float32)
            assert_close(lse.double(), exact_lse, "rounding", torch.float32, "lse")
    assert len(stand_in) == 3, "the kernel read each cache"


def test_nothing_is_copied(stand_in: list[dict[str, Any]]) -> None:  # noqa: F811
    """Tensors become views, also where rows are appended and turned first."""
    call = latent_call(small(page_size=16, room=96), "cpu")
    new = torch.randn(4, 1, 1, 264)
    table = torch.arange(4 * 6, dtype=torch.int32).view(4, 6)
    cache = torch.randn(24, 16, 1, 264)
    given = {
        **call.given, "block_table": table, "k_cache": cache, "v_cache": cache[..., :256],
        "k": new, "v": new[..., :256],
    }  # fmt: skip
    lowered_forward(checked(given))
    (seen,) = stand_in
    q, k, v, qv = (seen[name] for name in ("q", "k_cache", "v_cache", "qv"))
    assert qv.data_ptr() == given["q"].data_ptr() and qv.shape[-1] == 256
    assert q.data_ptr() == given["q"][..., 256:].data_ptr() and q.shape[-1] == 8
    assert v.data_ptr() == cache.data_ptr() and v.shape[-1] == 256
    assert k.data_ptr() == cache[..., 256:].data_ptr() and k.shape[-1] == 8
    for b, length in enumerate(call.form.lengths):
        page, place = divmod(length, 16)
        assert_same_bits(cache[table[b, page], place], new[b, 0], "appended")


def test_flash_attention_3s_function() -> None:
    """qv and caches go to the kernel as they come, and lengths are not read on the host."""
    call = latent_call(small(page_size=16), "cpu")
    given = with_qv(call, apart=True)
    out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(
        given["q"], given["k_cache"], given["v_cache"], qv=given["qv"],
        cache_seqlens=given["cache_seqlens"], page_table=given["block_table"], causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    tensors = (given["q"], given["k_cache"], given["v_cache"], given["cache_seqlens"])
    assert not _copies_pages(tensors, {name: given[name] for name in ("block_table", "qv")})
    exact, exact_lse, _ = call.expected()
    found = call.flat(out, lse)
    assert_close(found[0].double(), exact, "rounding", torch.float32)
    assert_close(found[1].double(), exact_lse, "rounding", torch.float32, "lse")


# ---- the kernel


def run(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return attention_with_cache(**given, backend="sm90", return_lse=True)


def served(form: Form) -> Call:
    """The call of a form; skips a test where no kernel with qv serves it."""
    call = latent_call(form)
    skip_unless_served(call.given, "sm90")
    return call


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 2, 4, 9])
def test_caches_of_all_kinds(dtype: torch.dtype, heads: int, queries: int) -> None:
    """Wherever the tokens lie, and in whichever form the call comes, the bits are the same."""
    options = {"max_seqlen_k": max(LENGTHS)}  # as many splits in all of them
    form = latent_form(queries, heads, lengths=LENGTHS, dtype=dtype, options=options)
    call = served(form)
    wanted = check(call, "sm90")
    ways = {"qv": with_qv(call), "qv apart": with_qv(call, apart=True)}
    for page_size in PAGES:
        ways[f"pages of {page_size}"] = latent_call(replace(form, page_size=page_size)).given
    for name, given in ways.items():
        for found, one in zip(call.flat(*run(given)), wanted, strict=True):
            assert_same_bits(found, one, name)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window": {"window": (37, 0)},
    "band": {"window": (100, 3), "causal": False},
    "steep": {"scale": 0.4},
    "flat": {"scale": 1e-4},
    "sink": {"sink": torch.linspace(-2, 4, 16)},
}


@gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_options(options: str, page_size: int) -> None:
    form = latent_form(
        3, lengths=LENGTHS, page_size=page_size, options=OPTIONS[options], batch_idx=True
    )
    check(served(form), "sm90")


@gpu
@pytest.mark.parametrize("splits", [1, 2, 7, 128])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [0, 64])
def test_splits(splits: int, heads: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences shorter than the splits are many, and those without tokens."""
    monkeypatch.setenv("CUTE_ATTENTION_SPLITS", str(splits))
    check(served(latent_form(2, heads, lengths=LENGTHS, page_size=page_size)), "sm90")


@gpu
@pytest.mark.parametrize("page_size", [0, 64])
def test_packed_queries(page_size: int) -> None:
    """Prompts and decoding in one call, more queries than keys, and none."""
    form = replace(
        latent_form(heads=16, page_size=page_size, lengths=(300, 0, 17, 640, 64, 1)),
        packed=True, queries=(150, 3, 30, 1, 0, 4),
    )  # fmt: skip
    check(served(form), "sm90")


@gpu
@pytest.mark.parametrize("dims", [(64, 256), (8, 504), (40, 320)], ids=str)
def test_fewer_columns(dims: tuple[int, int]) -> None:
    check(served(latent_form(2, dims=dims, lengths=(0, 5, 64, 333))), "sm90")


@gpu
@pytest.mark.parametrize("heads", [1, 5, 40, 96])
def test_heads_that_do_not_fill_tiles(heads: int) -> None:
    for queries in (1, 3):
        check(served(latent_form(queries, heads, lengths=(0, 5, 64, 333))), "sm90")


@gpu
def test_several_kv_heads() -> None:
    form = replace(latent_form(2, lengths=(0, 5, 64, 333), page_size=16), heads=(48, 3))
    check(served(form), "sm90")


@gpu
def test_many_tiles_of_a_cta() -> None:
    """More tiles than SMs, some of them empty: buffers and barriers go round many times."""
    lengths = tuple((37 * i) % 700 if i % 5 else 0 for i in range(300))
    call = served(latent_form(1, 128, lengths=lengths, page_size=64))
    first = check(call, "sm90")
    for _ in range(10):
        for found, one in zip(call.flat(*run(call.given)), first, strict=True):
            assert_same_bits(found, one, "the same call again")


@gpu
def test_a_row_of_a_tile_does_not_change_others() -> None:
    """NaN in one query head reaches no other."""
    call = served(latent_form(2, 64, lengths=(0, 5, 64, 333)))
    wanted, _ = run(call.given)
    q = call.given["q"].clone()
    q[:, 1, 7] = torch.nan
    out, _ = run({**call.given, "q": q})
    assert out[1:, 1, 7].isnan().all(), "sequences with tokens"
    out[:, 1, 7] = wanted[:, 1, 7]
    assert_same_bits(out, wanted, "out")


@gpu
@pytest.mark.parametrize("page_size", [0, 64])
def test_graphs_see_other_lengths(page_size: int) -> None:
    form = latent_form(2, lengths=(300, 1, 64, 512), page_size=page_size, room=640)
    call = served(form)
    others = [
        latent_call(replace(form, lengths=n)) for n in ((512, 512, 512, 640), (0, 17, 0, 640))
    ]
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in others[0].given.items()}
    given["v_cache"] = given["k_cache"][..., :LATENT]
    run(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(given)
    for other in (call, *others, call):
        refill(given, other.given)
        graph.replay()
        for found, one in zip((out, lse), run(other.given), strict=True):
            assert_same_bits(found, one, "replayed")


@gpu
def test_what_no_kernel_serves_says_why() -> None:
    call = served(latent_form(1, lengths=(5, 64)))
    apart = {**call.given, "v_cache": call.given["v_cache"].contiguous()}
    said = str(explain_with_cache(**apart))
    assert f"head_dim {ROPE + LATENT} is above the row's" in said
    said = str(explain_with_cache(**call.given, softcap=20.0))
    assert "it does not serve softcap" in said
