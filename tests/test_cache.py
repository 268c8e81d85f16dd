"""attention_with_cache against the formula: where tokens lie, appended rows, rotary, masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_calls import Call, Form
from cute_attention import attention_reference
from cute_attention.cache_arguments import CacheArguments
from cute_attention.inference import attention_with_cache
from cute_attention.inference.checked import checked_cache
from cute_attention.inference.lowered import lowered_forward
from cute_attention.inference.options import with_defaults
from tolerances import assert_as_accurate, assert_close, assert_same_bits

SLOPES = torch.tensor([0.5, 0.25, 0.1, -0.02])
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 1), "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": SLOPES, "sink": torch.tensor([0.1, -2.0, 3.0, 0.0])},
    "left": {"window": (7, None), "scale": 0.3},
    "slopes": {"alibi_slopes": SLOPES * torch.arange(1, 9)[:, None], "window": (None, 2)},
    "chunks": {"causal": True, "attention_chunk": 20},
    "few": {"attention_chunk": 7, "window": (3, 2)},
}
PAGES = [0, 16, 32, 48]


def arguments(call: Call, **changes: Any) -> CacheArguments:
    """The checked arguments of a call, whose caches are copies."""
    given = {**call.given, **changes}
    positional = [given.pop(n) for n in ("q", "k_cache", "v_cache", "cache_seqlens")]
    positional[1:3] = [cache.clone() for cache in positional[1:3]]
    options = with_defaults("attention_with_cache", given)
    return checked_cache(*positional, options)._replace(backend="reference")


def run_reference(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE and the caches that are left."""
    given = dict(call.given)
    given["k_cache"], given["v_cache"] = given["k_cache"].clone(), given["v_cache"].clone()
    out, lse = attention_with_cache(**given, backend="reference", return_lse=True)
    return out, lse, [given["k_cache"].cpu(), given["v_cache"].cpu()]


def run_lowered(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same through the packed call that stands for kernels, on the reference backend."""
    checked = arguments(call)
    out, lse = lowered_forward(checked)
    return out, lse, [checked.k_cache.cpu(), checked.v_cache.cpu()]


WAYS = {"reference": run_reference, "lowered": run_lowered}


def check(form: Form, way: str) -> None:
    """Results as the formula's, the new tokens in the caches and nothing else changed."""
    call = Call(form)
    wanted = call.caches_after()
    out, lse, caches = WAYS[way](call)
    for cache, want, name in zip(caches, wanted, ("k_cache", "v_cache"), strict=True):
        if form.rotary and name == "k_cache":  # a fused multiply-add may round otherwise
            assert_close(cache, want, "stored", name=name)
            before = call.given[name]
            same = before.isnan() == want.isnan()  # not written
            assert_same_bits(cache[same], before[same], name)
        else:
            assert_same_bits(cache, want, name)
    exact, exact_lse = call.expected(caches)
    out, lse = call.flat(out, lse)
    assert_close(out.double(), exact, "rounding", dtype=torch.float32, name="out")
    assert_close(lse.double(), exact_lse, "rounding", dtype=torch.float32, name="lse")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves", "interleaved partial"])
def test_cross_product(page_size: int, packed: bool, rotary: str, way: str) -> None:
    """Every combination of where tokens lie with what is appended; the masks go round."""
    masks = itertools.cycle(MASKS.values())
    for new, leftpad, batch_idx, _ in itertools.product(
        (None, 0, 1, 17), (False, True), (False, True), range(2)
    ):
        if rotary and new is None:
            continue
        check(
            Form(
                page_size=page_size, new=new, packed=packed, rotary=rotary, leftpad=leftpad,
                batch_idx=batch_idx, options=next(masks), queries=new or 3,
            ),
            way,
        )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("queries", [1, 40])
def test_masks(mask: str, page_size: int, queries: int, way: str) -> None:
    check(Form(page_size=page_size, options=MASKS[mask], queries=queries, leftpad=True), way)
    check(Form(page_size=page_size, options=MASKS[mask], packed=True, new=1), way)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotary", ["", "halves"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_at_most_twice_the_error_of_pytorch(
    dtype: torch.dtype, rotary: str, page_size: int
) -> None:
    form = Form(
        page_size=page_size, new=5, queries=5, rotary=rotary, options={"causal": True}, dtype=dtype,
        lengths=(7, 30, 64, 75),
    )  # fmt: skip
    call = Call(form)
    out, lse, caches = run_reference(call)
    out, _ = call.flat(out, lse)
    exact, _ = call.expected(caches)
    plain = torch.cat([plain_pytorch(*tensors) for tensors in call.sequences(caches)])
    assert_as_accurate(out, exact, plain, "out")


def plain_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with every step in the dtype of the inputs, `[rows, heads, dim]`."""
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("way", WAYS)
def test_shared_pages(way: str) -> None:
    """Two sequences with the same first pages, which are not copied, and pages of their own."""
    call = Call(Form(page_size=16, new=3, lengths=(40, 33), options={"causal": True}))
    table = call.given["block_table"]
    table[1, :2] = table[0, :2]
    wanted = call.caches_after()
    out, lse, caches = WAYS[way](call)
    for cache, want in zip(caches, wanted, strict=True):
        assert_same_bits(cache, want, "cache")
    found = call.flat(out, lse)
    for actual, exact in zip(found, call.expected(caches), strict=True):
        assert_close(actual.double(), exact, "rounding", dtype=torch.float32)


def test_pages_before_a_window_are_not_needed() -> None:
    """Entries of pages that no query sees any more name none, and nothing reads them."""
    options = {"window": (10, 0)}
    call = Call(Form(page_size=16, queries=2, lengths=(65, 90), options=options))
    wanted = run_reference(call)
    table = call.given["block_table"]
    assert all(0 <= int(entry) < 100 for entry in table[:, 0])
    table[0, :3] = -1  # the queries of the first stand at 63 and 64
    table[1, :4] = 2**31 - 1
    for actual, expected in zip(run_reference(call)[:2], wanted[:2], strict=True):
        assert_same_bits(actual, expected, "results")


def test_other_angles_and_qv() -> None:
    call = Call(Form(new=2, queries=2, rotary="halves", options={"causal": True}))
    angles = torch.arange(8, dtype=torch.int32) + 3
    qv = torch.randn(8, 2, 4, 24)
    results = []
    for run in (run_reference, run_lowered):
        call.given |= {"rotary_seqlens": angles, "qv": qv}
        results.append(run(call))
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        assert_close(one, other, "rounding")
    for one, other in zip(results[0][2], results[1][2], strict=True):
        assert_same_bits(one, other, "cache")
    # The same without qv: q and qv beside each other meet k and v beside each other.
    b, length = 5, 48
    k_cache, v_cache = results[0][2]
    k, v = (cache[b, None, : length + 2].double() for cache in (k_cache, v_cache))
    q = call.turned(call.given["q"][b], int(angles[b]))[None].double()
    joined = torch.cat((q, qv[b, None].double()), -1), torch.cat((k, v), -1), v
    out = attention_reference(*joined, causal=True)
    assert_close(results[0][0][b, None].double(), out, "rounding", dtype=torch.float32)


def test_values_in_the_keys() -> None:
    """v_cache as a view of k_cache, as in absorbed latent attention: one write serves both."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    k_cache, k = torch.randn(2, 32, 1, 24), torch.randn(2, 3, 1, 24)
    q = torch.randn(2, 3, 6, 24)
    apart = k_cache.clone(), k_cache[..., :16].clone()
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    wanted = attention_with_cache(q, *apart, lengths, k=k, v=k[..., :16].clone(), **options)
    found = attention_with_cache(
        q, k_cache, k_cache[..., :16], lengths, k=k, v=k[..., :16], **options
    )
    assert_same_bits(k_cache, apart[0], "k_cache")
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other, "results")


def test_an_int_or_none_for_all_lengths() -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 12, 2, 8)
    for given, length in ((7, 7), (None, 12)):
        whole = torch.full((2,), length, dtype=torch.int32)
        wanted = attention_with_cache(q, cache, cache, whole)
        assert_same_bits(attention_with_cache(q, cache, cache, given), wanted, "out")


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_at_all(packed: bool) -> None:
    """No sequence, no query, no head: empty results, and caches as they were."""
    cache = torch.randn(3, 8, 2, 4)
    saved = cache.clone()
    given: dict[str, Any] = {}
    if packed:
        ends = torch.zeros(1, dtype=torch.int32)
        given = {"cu_seqlens_q": ends, "k": torch.ones(2, 2, 4), "v": torch.ones(2, 2, 4)}
    q = torch.randn(5, 4, 4) if packed else torch.randn(0, 5, 4, 4)
    none = torch.zeros(0, dtype=torch.int32)
    for way in (attention_with_cache, lowered):
        out, lse = way(q, cache, cache, none, return_lse=True, **given)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == -torch.inf).all()
    out = attention_with_cache(torch.randn(3, 0, 4, 4), cache, cache, 4)
    assert out.shape == (3, 0, 4, 4)
    headless = torch.zeros(3, 8, 0, 4)
    assert attention_with_cache(torch.zeros(3, 2, 0, 4), headless, headless, 4).shape[2] == 0
    assert torch.equal(cache, saved)


def lowered(*tensors: Any, return_lse: bool, **given: Any) -> tuple[Tensor, Tensor]:
    """`lowered_forward` with the arguments of `attention_with_cache`."""
    assert return_lse
    checked = checked_cache(*tensors, with_defaults("attention_with_cache", given))
    return lowered_forward(checked._replace(backend="reference"))


@pytest.mark.parametrize("way", WAYS)
def test_packed_rows_of_no_sequence(way: str) -> None:
    """The padding of CUDA graphs: not read, not written, output 0 and LSE -inf even with a sink."""
    call = Call(Form(packed=True, new=1, options={"causal": True, "sink": torch.zeros(4)}))
    bare = WAYS[way](call)
    for name in ("q", "k", "v"):
        rows = torch.full_like(call.given[name][:2], torch.nan)
        call.given[name] = torch.cat((call.given[name], rows))
    out, lse, caches = WAYS[way](call)
    count = bare[0].shape[0]
    assert_same_bits(out[:count], bare[0], "out")
    assert not out[count:].any()
    assert (lse[:, count:] == -torch.inf).all()
    for cache, want in zip(caches, bare[2], strict=True):
        assert_same_bits(cache, want, "cache")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("new", [None, 1])
@pytest.mark.parametrize("where", [{"page_size": 5}, {"batch_idx": True}], ids=str)
def test_sequences_longer_than_is_said(
    where: dict[str, Any], new: int | None, packed: bool
) -> None:
    """Where keys are copied, as many as `max_seqlen_k` says: rows of a longer sequence are right or
    NaN, those of the others right, rows of no sequence empty."""
    said = 31
    call = Call(Form(**where, packed=packed, new=new, options={"causal": True}))
    if packed:
        call.given["q"] = torch.cat((call.given["q"], torch.ones_like(call.given["q"][:2])))
    wanted, wanted_lse, _ = WAYS["lowered"](call)
    call.given["max_seqlen_k"] = said
    out, lse, _ = WAYS["lowered"](call)
    if not packed:
        lse, wanted_lse = (t.transpose(0, 1).flatten(1) for t in (lse, wanted_lse))
        out, wanted = out.flatten(0, 1), wanted.flatten(0, 1)
    total = [old + more for old, more in zip(call.form.lengths, call.many_new, strict=True)]
    shorter = [n <= said for n, many in zip(total, call.many_q, strict=True) for _ in range(many)]
    same = torch.tensor(shorter + [True] * (len(out) - len(shorter)))
    assert 0 < same.sum() < len(same)
    assert_same_bits(out[same], wanted[same], "out")
    assert_same_bits(lse[:, same], wanted_lse[:, same], "lse")
    for row in (~same).nonzero().flatten().tolist():
        for found, want in ((out[row], wanted[row]), (lse[:, row], wanted_lse[:, row])):
            assert found.isnan().all() or torch.allclose(found, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_number_is_turned(interleaved: bool) -> None:
    """A rotary_dim of 0 leaves queries and new keys as they are."""
    q, k, v = torch.randn(3, 2, 1, 2, 16).unbind()
    angles = torch.empty(8, 0)
    results = []
    for rotary in ({}, {"rotary_cos": angles, "rotary_sin": angles}):
        caches = [torch.zeros(2, 8, 2, 16) for _ in range(2)]
        out = attention_with_cache(
            q, *caches, 3, k=k, v=v, rotary_interleaved=interleaved, **rotary
        )
        results.append([out, *caches])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
