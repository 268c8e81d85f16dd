"""Calls whose cache a kernel reads where it lies: which they are, and what the kernel is told. On
the CPU plain PyTorch stands in for the kernel."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_calls import Call, Form
from cute_attention import attention_reference
from cute_attention.arguments import FEATURES
from cute_attention.cache_arguments import CACHE, QV, CacheArguments
from cute_attention.dispatch import backends, select
from cute_attention.dispatch.jit import best_rows
from cute_attention.errors import BackendError, FallbackWarning
from cute_attention.inference import append, choice, explain_with_cache, lowered
from cute_attention.inference.in_place import PAGE_ROWS, obstacle
from cute_attention.integrations.flash_attn.kvcache import _copies_pages
from cute_attention.problem import Problem
from test_cache import MASKS, arguments
from tolerances import assert_close, assert_same_bits

FULL: dict[str, Any] = {}
ALIBI = next(bit for bit, name in FEATURES.items() if name.startswith("alibi"))


def refuse(given: dict[str, Any]) -> None:
    """Checks tensors like the binding, in few words."""
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    packed, paged = given["cu_seqlens_q"] is not None, given["block_table"] is not None
    batch = (given["cu_seqlens_q"].numel() - 1) if packed else q.shape[0]

    def check(right: bool, name: str) -> None:
        if not right:
            raise RuntimeError(f"{name} must be another")

    check(q.dim() == (3 if packed else 4) and k_cache.dim() == v_cache.dim() == 4, "q")
    check(k_cache.dtype == v_cache.dtype == q.dtype, "k_cache")
    check(k_cache.shape[:3] == v_cache.shape[:3] and k_cache.shape[3] == q.shape[-1], "v_cache")
    check(q.shape[-2] % k_cache.shape[2] == 0, "q")
    check(paged or given["cache_batch_idx"] is not None or len(k_cache) >= batch, "k_cache")
    check(k_cache.shape[1] > 0 and (not paged or k_cache.shape[1] % PAGE_ROWS == 0), "k_cache")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        check(0 <= (given[name] or 0) < 2**31, name)
    lengths = {
        "cache_seqlens": batch, "leftpad": batch, "cache_batch_idx": batch,
        "rotary_seqlens": batch, "cu_seqlens_q": batch + 1, "cu_seqlens_k_new": batch + 1,
    }  # fmt: skip
    for name, length in lengths.items():
        value = given[name]
        right = value is None or (value.shape == (length,) and value.is_contiguous())
        check(right and (value is None or value.dtype == torch.int32), name)
    table = given["block_table"]
    if paged:
        check(table.dim() == 2 and table.dtype == torch.int32 and table.stride(1) == 1, "table")
        check(given["cache_batch_idx"] is not None or len(table) >= batch, "table")
    for name, cache in (("k", k_cache), ("v", v_cache)):
        new = given[name]
        if new is not None:
            dim = 3 if given["cu_seqlens_k_new"] is not None else 4
            check(new.dim() == dim and new.dtype == q.dtype and len(new) == len(given["k"]), name)
            check(new.shape[-2:] == cache.shape[-2:] and (dim == 3 or len(new) == batch), name)
            check(new.shape[-3] == given["k"].shape[-3], name)
            check(cache.stride(3) == 1 and not any(s % 8 for s in cache.stride()[:3]), name)
    qv = given["qv"]
    if qv is not None:
        check(qv.dtype == q.dtype and qv.shape == (*q.shape[:-1], v_cache.shape[3]), "qv")
    cos, sin = given["rotary_cos"], given["rotary_sin"]
    if cos is not None:
        check(cos.shape == sin.shape and cos.dim() == 2 and cos.dtype == sin.dtype, "cos")
        check(cos.dtype in (q.dtype, torch.float32) and 2 * cos.shape[1] <= q.shape[-1], "cos")
    for name, shapes in (
        ("sink", [(q.shape[-2],)]), ("alibi_slopes", [(q.shape[-2],), (batch, q.shape[-2])])
    ):  # fmt: skip
        value = given[name]
        check(value is None or (value.dtype == torch.float32 and value.shape in shapes), name)


def attend_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, options: str,
    k: Tensor | None = None, v: Tensor | None = None, block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_k: int | None = None,
    cache_batch_idx: Tensor | None = None, leftpad: Tensor | None = None,
    rotary_seqlens: Tensor | None = None, alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What AppendParams and KeyCache of params.h say, sequence by sequence."""
    backend, *words = options.split()
    scale, softcap = float(words[0]), float(words[3])
    window_left, window_right, num_splits = int(words[1]), int(words[2]), int(words[4])
    _batch_invariant, rotary_interleaved, turns_each_query = (word == "1" for word in words[5:])
    seqused_k, leftpad_k = cache_seqlens, leftpad
    batch = len(seqused_k)
    assert 0 <= num_splits <= 128
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if k is not None:
        new = CacheArguments(
            q, k_cache, v_cache, seqused_k, backend, scale, k=k, v=v, block_table=block_table,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            cache_batch_idx=cache_batch_idx, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens,
            window_right=0 if turns_each_query else -1,
        )  # fmt: skip
        append.append(new)
        q = q if rotary_cos is None else append.rotated_queries(new)
        seqused_k = append.total_lengths(new)
    q = q if qv is None else torch.cat((q, qv), -1)
    for numbers in (seqused_k, leftpad_k, cache_batch_idx):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
        assert numbers is None or numbers.shape == (batch,)
    packed = cu_seqlens_q is not None
    ends = cu_seqlens_q if packed else torch.arange(batch + 1) * q.shape[1]
    longest_q = len(q) if max_seqlen_q is None else max_seqlen_q
    assert not packed or int(ends.diff().max()) <= longest_q
    assert backend == "sm80"
    assert int(seqused_k.max()) <= min(max_seqlen_k or room, room)
    rows = q if packed else q.flatten(0, 1)
    out = rows.new_zeros(*rows.shape[:-1], v_cache.shape[-1])
    lse = rows.new_full((rows.shape[1], rows.shape[0]), -torch.inf)
    sides = [None if side < 0 else side for side in (window_left, window_right)]
    for b in range(batch):
        mine = slice(int(ends[b]), int(ends[b + 1]))
        used, row = int(seqused_k[b]), b if cache_batch_idx is None else int(cache_batch_idx[b])
        first = 0 if leftpad_k is None else min(int(leftpad_k[b]), used)
        if sides[0] is not None:  # the table has nothing for what the first query does not see
            first = max(first, used - (mine.stop - mine.start) - sides[0])
        tokens = torch.arange(first, used)
        if block_table is None:
            k, v = k_cache[row, tokens], v_cache[row, tokens]
        else:
            size = k_cache.shape[1]
            pages = block_table[row].long()[tokens // size]
            k, v = k_cache[pages, tokens % size], v_cache[pages, tokens % size]
        k = k if qv is None else torch.cat((k, v), -1)
        two = alibi_slopes is not None and alibi_slopes.dim() == 2
        results = attention_reference(
            rows[None, mine], k[None], v[None], window=tuple(sides), scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes[b] if two else alibi_slopes, sink=sink, return_lse=True,
        )  # fmt: skip
        out[mine], lse[:, mine] = results[0][0], results[1][0]
    if packed:
        return out, lse
    return out.view(*q.shape[:-1], -1), lse.view(-1, batch, q.shape[1]).transpose(0, 1).clone()


@contextlib.contextmanager
def standing_in() -> Iterator[list[dict[str, Any]]]:
    """What the ops of the kernel were called with, for which `attend_cache` stands in."""
    calls: list[dict[str, Any]] = []
    library = torch.library.Library("cute_attention", "IMPL")

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        given = dict.fromkeys(inspect.signature(attend_cache).parameters)
        given.update(zip(given, args, strict=False))
        calls.append(given)
        refuse(given)
        return attend_cache(**given)

    for name in ("attend_cache", "brief_attend_cache"):
        library.impl(name, run, "CPU")
        library.impl(f"{name}.output", lambda *args: run(*args)[0], "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@pytest.fixture
def stand_in() -> Iterator[list[dict[str, Any]]]:
    """What the kernel was called with."""
    with standing_in() as calls:
        yield calls


@pytest.mark.parametrize("mask", [name for name in MASKS if name not in ("chunks", "few")])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("page_size", [0, 16, 48])
def test_results(mask: str, packed: bool, page_size: int, stand_in: list[dict[str, Any]]) -> None:
    """With everything that a kernel may not read poisoned."""
    for new, batch_idx in ((None, True), (1, False), (17, True)):
        form = Form(
            page_size=page_size, new=new, packed=packed, leftpad=not page_size,
            batch_idx=batch_idx, options=MASKS[mask], rotary="halves" if new else "",
        )  # fmt: skip
        call = Call(form)
        checked = arguments(call)._replace(backend="sm80")
        assert obstacle(checked) == ""
        results = call.flat(*lowered.lowered_forward(checked))
        assert len(stand_in) == 1, "the kernel read the cache"
        stand_in.clear()
        caches = [checked.k_cache, checked.v_cache]
        for found, exact in zip(results, call.expected(caches), strict=True):
            assert_close(found.double(), exact, "rounding", torch.float32, "lse")


def test_nothing_is_copied(stand_in: list[dict[str, Any]]) -> None:
    call = Call(Form(page_size=16, batch_idx=True, options={"causal": True}))
    checked = arguments(call)._replace(backend="sm80", max_seqlen_k=70)
    lowered.lowered_forward(checked)
    (given,) = stand_in
    for name in ("k_cache", "v_cache", "block_table"):
        tensor = getattr(checked, name)
        assert given[name].data_ptr() == tensor.data_ptr()
        assert given[name].shape == tensor.shape
    assert given["max_seqlen_k"] == 70, "what the host knows of lengths"
    assert given["max_seqlen_q"] == 0, "queries are not packed"


@pytest.mark.parametrize("page_size", [0, 16])
def test_strides_that_kernels_do_not_read(page_size: int, stand_in: list[dict[str, Any]]) -> None:
    """Lengths, rows and tables that are parts of other tensors."""
    call = Call(Form(page_size=page_size, batch_idx=True, leftpad=not page_size, packed=True))
    wanted = lowered.lowered_forward(arguments(call)._replace(backend="sm80"))
    names = {"cache_seqlens", "cache_batch_idx", "leftpad", "cu_seqlens_q"} & call.given.keys()
    for name in names:
        call.given[name] = torch.stack((call.given[name], call.given[name] + 1), 1)[:, 0]
        assert not call.given[name].is_contiguous()
    if page_size:
        call.given["block_table"] = call.given["block_table"].T.contiguous().T
    found = lowered.lowered_forward(arguments(call)._replace(backend="sm80"))
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other, "results")
    (*_, given) = stand_in
    assert given["cu_seqlens_q"].is_contiguous()
    assert given["block_table"] is None or given["block_table"].stride(1) == 1


OBSTACLES: dict[str, tuple[Form, dict[str, Any]]] = {
    "attention_chunk": (Form(), {"attention_chunk": 20, "causal": True}),
    "qv": (Form(), {"qv": torch.ones(8, 3, 4, 24)}),
    "leftpad with pages": (Form(page_size=16, leftpad=True), FULL),
    "pages of 24 tokens, no multiple of 16": (Form(page_size=24), FULL),
    "a cache without room": (
        Form(), {"k_cache": torch.zeros(8, 0, 2, 16), "v_cache": torch.zeros(8, 0, 2, 24)},
    ),
    "a head dim of 20, no multiple of 8": (Form(), {"v_cache": torch.zeros(8, 96, 2, 20)}),
}  # fmt: skip


@pytest.mark.parametrize("reason", OBSTACLES)
def test_other_calls_are_packed(
    reason: str, stand_in: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    form, changes = OBSTACLES[reason]
    call = Call(form)
    checked = arguments(call, **changes)
    assert obstacle(checked) == reason
    packed = []
    monkeypatch.setattr(lowered, "_attend_packed", lambda *args: packed.append(args))
    lowered.lowered_forward(checked._replace(backend="sm80"))
    assert len(packed) == 1
    assert not stand_in


def test_explain_says_how_the_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here every problem is said to be served by sm80."""
    plain = choice.explain_problem

    def served(*args: Any) -> Any:
        return choice.replace(plain(*args), chosen="sm80")

    call = Call(Form(page_size=16))
    assert "read in place" not in str(explain_with_cache(**call.given)), "the reference reads"
    monkeypatch.setattr(choice, "explain_problem", served)
    assert "cache, pages, cache read in place" in str(explain_with_cache(**call.given))
    leftpad = torch.ones(8, dtype=torch.int32)
    packed = str(explain_with_cache(**call.given, leftpad=leftpad))
    assert "cache packed for the kernel (leftpad with pages)" in packed
    invariant = str(explain_with_cache(**call.given, batch_invariant=True))
    assert "batch_invariant, cache read in place" in invariant
    refused = explain_with_cache(**call.given, batch_invariant=True, leftpad=leftpad)
    assert refused.chosen == "reference"
    assert "no kernel promises batch_invariant with leftpad with pages" in str(refused)


def test_the_size_of_pages_is_that_of_the_kernels() -> None:
    header = Path(__file__).parents[1] / "include/cute_attention/params.h"
    assert f"kPageRows = {PAGE_ROWS};" in header.read_text()


def test_the_bits_of_features_are_those_of_the_kernels() -> None:
    header = (Path(__file__).parents[1] / "include/cute_attention/config.h").read_text()
    for name, bit in (("kCache", CACHE), ("kQv", QV)):
        assert re.search(rf"{name} = {bit},", header), name


# softcap and alibi_slopes at head dims above 128: the one row that has both reads no cache.
BOTH: dict[str, Any] = {"softcap": 0.5, "alibi_slopes": torch.ones(4)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU whose kernels, of sm90, lack what those of wide heads lack."""

    def report(self: backends.Kernels, problem: Problem) -> backends.Report:
        both = problem.softcap > 0 and bool(problem.features & ALIBI)
        if self.name == "sm90" and not (both and problem.features & CACHE):
            return backends.Report(self.name, True, ())
        return backends.Report(self.name, False, ("it does not serve a cache",))

    choose_on = select._choose
    at_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(backends.Kernels, "report", report)
    monkeypatch.setattr(
        select, "_choose", lambda p, asked: choose_on(p._replace(device=at_gpu), asked)
    )
    for name, value in (("_choices", {}), ("_warned", {})):
        monkeypatch.setattr(select, name, value)
    monkeypatch.delenv("CUTE_ATTENTION_BACKEND", raising=False)


def asking(call: Call, options: dict[str, Any], backend: str = "auto") -> CacheArguments:
    return arguments(call, **options)._replace(backend=backend)


@pytest.mark.usefixtures("gpu")
def test_no_kernel_that_reads_no_cache_is_chosen() -> None:
    """What falls back warns, what is forced raises, and `explain_with_cache` says the same."""
    call = Call(Form())
    with pytest.warns(FallbackWarning, match="does not serve a cache"):
        assert choice.choose(asking(call, BOTH))[1] == "reference"
    assert explain_with_cache(**{**call.given, **BOTH}).chosen == "reference"
    with pytest.raises(BackendError, match="does not serve a cache"):
        choice.choose(asking(call, BOTH, "sm90"))
    assert explain_with_cache(**{**call.given, **BOTH}, backend="sm90").chosen is None
    for fewer in BOTH:
        alone = {fewer: BOTH[fewer]}
        assert choice.choose(asking(call, alone))[1] == "sm90"
        assert explain_with_cache(**{**call.given, **alone}).chosen == "sm90"


@pytest.mark.usefixtures("gpu")
def test_a_cache_that_is_packed_needs_no_kernel_that_reads_one() -> None:
    call = Call(Form(page_size=24))
    assert choice.choose(asking(call, BOTH))[1] == "sm90"
    assert explain_with_cache(**{**call.given, **BOTH}).chosen == "sm90"


def test_no_row_that_reads_no_cache_is_built_for_one() -> None:
    problem = Problem(head_dim=256, head_dim_v=256, softcap=1.0, features=ALIBI)
    names = [row.name for row in best_rows(problem, "sm90", 227 * 1024)]
    assert names == ["sm90_fwd_bf16_d256_every"]
    cached = problem._replace(features=ALIBI | CACHE)
    assert best_rows(cached, "sm90", 227 * 1024) == []
    narrow = cached._replace(head_dim=128, head_dim_v=128)
    assert best_rows(narrow, "sm90", 227 * 1024)[0].name == "sm90_fwd_bf16_d128_softcap_alibi"


@pytest.mark.parametrize(
    ("page_size", "options", "copies"),
    [
        (16, {}, False),
        (16, {"leftpad": None, "qv": None, "attention_chunk": 0}, False),
        (24, {}, True),
        (16, {"leftpad": torch.ones(2, dtype=torch.int32)}, True),
        (16, {"attention_chunk": 4}, True),
        (16, {"block_table": None}, False),
        (16, {"block_table": "no tensor"}, False),
    ],
)
def test_flash_attn_asks_for_the_longest_where_pages_are_copied(
    page_size: int, options: dict[str, Any], copies: bool
) -> None:
    """It would wait for the device."""
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(9, page_size, 2, 16)
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    options = {"block_table": torch.zeros(2, 4, dtype=torch.int32), **options}
    assert _copies_pages((q, cache, cache, lengths), options) is copies
