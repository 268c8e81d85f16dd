"""attention_with_cache: bits that do not depend on batch or chunks, unused memory, compiled code,
opcheck, FLOPs, explain, gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cache_calls import Call, Form
from cute_attention import BackendError, attention, use_backend
from cute_attention.inference import attention_with_cache, explain_with_cache
from test_cache import MASKS, arguments
from tolerances import assert_close, assert_same_bits

OPS = torch.ops.cute_attention


# --- the same bits ------------------------------------------------------------------------------


def prompt(dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = (length, 4, 16), (length, 2, 16), (length, 2, 24)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def in_chunks(
    tensors: tuple[Tensor, Tensor, Tensor], chunks: list[int], page_size: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a prompt that comes in chunks of these lengths, then token by token."""
    q, k, v = tensors
    rows = 3 if page_size else 1
    room = page_size or 320
    caches = [
        torch.full((rows * 320 // room, room, *t.shape[1:]), torch.nan, dtype=t.dtype)
        for t in (k, v)
    ]
    table = None
    if page_size:
        generator = torch.Generator().manual_seed(len(chunks))
        pages = torch.randperm(caches[0].shape[0], generator=generator)[: 320 // page_size]
        table = pages.int()[None]
    outs, lses, done = [], [], 0
    for count in [*chunks, *[1] * (len(q) - sum(chunks))]:
        part = slice(done, done + count)
        out, lse = attention_with_cache(
            q[None, part], *caches, torch.tensor([done], dtype=torch.int32), k=k[None, part],
            v=v[None, part], block_table=table, causal=True, batch_invariant=True,
            return_lse=True, **options,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
        done += count
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "alibi", "chunks"])
def test_chunks_of_a_prompt_change_no_bit(dtype: torch.dtype, mask: str) -> None:
    """Prefill at once, in chunks that end anywhere, and pages of any size: the same bits. The
    prompt is longer than a block of keys."""
    tensors = prompt(dtype, 300)
    options = {name: value for name, value in MASKS[mask].items() if name != "causal"}
    whole = in_chunks(tensors, [300], 0, **options)
    for chunks, page_size in (([255, 2, 17, 20], 0), ([1, 130, 160], 16), ([290], 64)):
        found = in_chunks(tensors, chunks, page_size, **options)
        for one, other, name in zip(found, whole, ("out", "lse"), strict=True):
            assert_same_bits(one, other, name)
    plain = attention(*(t[None] for t in tensors), causal=True) if mask == "causal" else None
    if plain is not None:
        assert_close(whole[0], plain[0], "rounding" if dtype == torch.float32 else "stored")


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_the_batch_around_changes_no_bit(page_size: int, packed: bool) -> None:
    """Each sequence by itself, with other padding of the batch around it."""
    options = {**MASKS["alibi"], "batch_invariant": True}
    call = Call(Form(page_size=page_size, packed=packed, new=2, leftpad=True, options=options))
    checked = arguments(call)
    out, _ = call.flat(*OPS.reference_cached_forward(*checked))
    row = 0
    for b, (rows, new) in enumerate(zip(call.many_q, call.many_new, strict=True)):
        alone = {
            "q": call._of("q", call.many_q, b)[None], "k": call._of("k", call.many_new, b)[None],
            "v": call._of("v", call.many_new, b)[None],
            "cache_seqlens": call.given["cache_seqlens"][b, None],
            "leftpad": call.given["leftpad"][b, None],
        }  # fmt: skip
        for name in ("k_cache", "v_cache"):
            cache = call.given[name].clone()
            alone[name] = cache if page_size else cache[b, None]
        if page_size:
            alone["block_table"] = call.given["block_table"][b, None]
        mine = attention_with_cache(**alone, **options)
        assert_same_bits(mine[0], out[row : row + rows], f"sequence {b} of {new} new tokens")
        row += rows


def test_chunks_change_bits_where_nothing_is_promised() -> None:
    """The test above can fail: without the promise the same prompt has other bits."""
    q, k, v = prompt(torch.float32, 1000)
    whole = attention_with_cache(q[None], k[None], v[None], None, causal=True)
    last = attention_with_cache(q[None, -7:], k[None], v[None], None, causal=True)
    assert_close(last, whole[:, -7:], "rounding")
    assert not torch.equal(last, whole[:, -7:])


# --- torch's machinery --------------------------------------------------------------------------

FORMS = {
    "plain": Form(new=2, queries=2, options={"causal": True}),
    "read": Form(options={"window": (9, 1), "softcap": 3.0}),
    "pages": Form(
        page_size=16, new=2, rotary="halves", leftpad=True, batch_idx=True,
        options=MASKS["alibi"],
    ),
    "packed": Form(page_size=32, new=1, packed=True, rotary="interleaved"),
}  # fmt: skip


def without_poison(form: Form, device: str) -> Call:
    """opcheck compares what it finds in memory, and NaN is not NaN."""
    call = Call(form, device)
    for name in ("k_cache", "v_cache"):
        call.given[name] = call.given[name].nan_to_num(0.5)
    return call


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str, device: str) -> None:
    checked = arguments(without_poison(FORMS[form], device))
    torch.library.opcheck(OPS.reference_cached_forward.default, checked)
    torch.library.opcheck(OPS.reference_cached_forward.output, checked)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_writes_the_caches(form: str, dynamic: bool) -> None:
    """One graph; the caches are written in it, and read in the same graph after that."""
    torch._dynamo.reset()

    def step(given: dict[str, Any]) -> Any:
        k_cache = given["k_cache"]
        out, lse = attention_with_cache(**given, return_lse=True, backend="reference")
        return 2 * out, lse, k_cache.sum()

    call = without_poison(FORMS[form], "cpu")
    mine, theirs = (
        {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.given.items()}
        for _ in range(2)
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for one, other in zip(compiled(mine), step(theirs), strict=True):
        assert_close(one, other, "exact")
    for name in ("k_cache", "v_cache"):
        assert_same_bits(mine[name], theirs[name], name)


def test_compiled_code_with_values_in_the_keys() -> None:
    """v_cache is a view of k_cache, inside of the graph."""
    torch._dynamo.reset()

    def step(q: Tensor, cache: Tensor, lengths: Tensor, k: Tensor) -> Tensor:
        values = cache[..., :16], k[..., :16]
        out = attention_with_cache(q, cache, values[0], lengths, k=k, v=values[1], causal=True)
        return out + cache.sum()

    torch.manual_seed(0)
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    cache, k, q = torch.randn(2, 32, 1, 24), torch.randn(2, 3, 1, 24), torch.randn(2, 3, 6, 24)
    caches = cache.clone(), cache.clone()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, caches[0], lengths, k)
    assert_close(found, step(q, caches[1], lengths, k), "exact")
    assert_same_bits(caches[0], caches[1], "cache")


def test_inference_mode_and_autocast() -> None:
    call = Call(FORMS["plain"])
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.given.items()}
    wanted = attention_with_cache(**{**given, "k_cache": given["k_cache"].clone()})
    with torch.inference_mode():
        again = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.given.items()}
        assert_same_bits(attention_with_cache(**again), wanted, "out")
    half = {n: t.bfloat16() for n, t in call.given.items() if n in ("k_cache", "v_cache")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_with_cache(**{**given, **half})
    assert out.dtype == torch.bfloat16
    rounded = {n: given[n].bfloat16() for n in ("q", "k", "v")}
    half = {n: t.bfloat16() for n, t in call.given.items() if n in half}
    assert_same_bits(out, attention_with_cache(**{**given, **half, **rounded}), "out")


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_gradients_are_refused(name: str) -> None:
    given = Call(FORMS["read"]).given
    given[name] = given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"attention_with_cache: {name} requires a gradient"):
        attention_with_cache(**given)
    with torch.no_grad():
        assert not attention_with_cache(**given).requires_grad


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_flops(form: str) -> None:
    call = Call(FORMS[form])
    totals = [n + m for n, m in zip(call.form.lengths, call.many_new, strict=True)]
    pairs = sum(n * m for n, m in zip(call.many_q, totals, strict=True))
    with FlopCounterMode(display=False) as counter:
        attention_with_cache(**call.given)
    assert counter.get_total_flops() == 2 * pairs * 4 * (16 + 24)
    hollow = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in call.given.items()}
    with FlopCounterMode(display=False) as counter:
        attention_with_cache(**hollow)
    assert counter.get_total_flops() == 2 * sum(call.many_q) * 96 * 4 * (16 + 24)


# --- the choice ---------------------------------------------------------------------------------


def test_explain() -> None:
    call = Call(FORMS["pages"])
    saved = call.given["k_cache"].clone()
    answer = explain_with_cache(**call.given)
    assert answer.chosen == "reference"
    assert [report.backend for report in answer.forward] == ["sm90", "sm80", "reference"]
    for words in ("seqlen 3 x 96", "cache, append, pages, rotary, leftpad", "alibi, sink"):
        assert words in str(answer)
    assert "backward" not in str(answer)
    assert_same_bits(call.given["k_cache"], saved, "k_cache")
    promised = explain_with_cache(**call.given, batch_invariant=True)
    reason = "no kernel promises batch_invariant with leftpad with pages"
    assert promised.forward[0].reasons == (reason,)
    joined = explain_with_cache(**Call(FORMS["read"]).given, qv=torch.ones(8, 3, 4, 24))
    assert "head dim 40 and 24" in joined.call


def test_a_backend_that_cannot_is_named() -> None:
    given = Call(FORMS["read"]).given
    with pytest.raises(BackendError, match="backend 'sm80' cannot serve this call"):
        attention_with_cache(**given, backend="sm80")
    words = "backend 'sm90' cannot serve this call: no kernel promises batch_invariant with leftpad"
    given = Call(FORMS["pages"]).given
    with use_backend("sm90"), pytest.raises(BackendError, match=words):
        attention_with_cache(**given, batch_invariant=True)
    assert explain_with_cache(**given, batch_invariant=True, backend="sm80").chosen is None


MEASURE_MEMORY = """
import sys
import torch
from cute_attention.inference import attention_with_cache

def megabytes(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6

def attend(seqlen):
    cache = torch.randn(2, seqlen // 16, 16, 1, 64)
    q = torch.randn(1, min(seqlen, 8192), 1, 64)
    table = torch.randperm(seqlen // 16).int()[None]
    before = megabytes("VmRSS")
    attention_with_cache(q, *cache, None, block_table=table, causal=True)
    return megabytes("VmHWM") - before

attend(256)
print(attend(16384))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_linear() -> None:
    """8192 queries over 16384 keys in pages: their scores alone would be 537 MB."""
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) < 150
