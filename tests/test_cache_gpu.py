"""attention_with_cache on a GPU: kernels serve it, nothing waits, graphs see other lengths."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_calls import Call, Form
from cute_attention import FallbackWarning
from cute_attention.inference import attention_with_cache, choice, explain_with_cache
from test_cache import MASKS, PAGES, arguments, plain_pytorch
from test_cache_promises import without_poison
from tolerances import assert_as_accurate, assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

# What kernels with small head dims serve: no ALiBi, and with softcap other rows.
SERVED = ("full", "causal", "left", "chunks")
BF16 = torch.bfloat16


def run(call: Call, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.given.items()}
    out, lse = attention_with_cache(**given, **options, return_lse=True)
    return out, lse, [given["k_cache"].cpu(), given["v_cache"].cpu()]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rotary", ["", "halves"])
def test_results_and_caches(page_size: int, packed: bool, rotary: str) -> None:
    """Kernels, with everything that they may not read poisoned."""
    for index, mask in enumerate(SERVED):
        form = Form(
            page_size=page_size, new=(1, 5)[index % 2], packed=packed, rotary=rotary,
            leftpad=index > 1, batch_idx=index in (1, 2), options=MASKS[mask], dtype=BF16,
        )  # fmt: skip
        call = Call(form, "cuda")
        assert explain_with_cache(**call.given).chosen in ("sm90", "sm80")
        out, lse, caches = run(call)
        reference = run(call, backend="reference")
        for cache, want in zip(caches, reference[2], strict=True):
            assert_same_bits(cache, want, "cache")
        out, lse = call.flat(out, lse)
        exact, exact_lse = call.expected(caches)
        assert_close(out.double(), exact, "rounding", BF16)
        assert_close(lse.double(), exact_lse, "gradient", torch.float32, "lse")
        if mask == "causal" and not packed:
            plain = torch.cat([plain_pytorch(*t) for t in call.sequences(caches)])
            assert_as_accurate(out, exact, plain.nan_to_num(), "out")


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_the_device(page_size: int, packed: bool) -> None:
    form = Form(
        page_size=page_size, new=1, packed=packed, rotary="halves", leftpad=True,
        options=MASKS["causal"], dtype=BF16,
    )  # fmt: skip
    call = Call(form, "cuda")
    run(call)  # what is loaded at a first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_with_cache(**call.given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("page_size", [0, 32])
def test_a_graph_is_replayed_with_other_lengths(page_size: int) -> None:
    form = Form(page_size=page_size, new=1, options=MASKS["causal"], dtype=BF16, queries=1)
    call = Call(form, "cuda")
    run(call)
    torch.cuda.synchronize()
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_with_cache(**given)
    for lengths in ((3, 1, 0, 9, 31, 20, 64, 15), (0, 0, 0, 0, 0, 0, 0, 0)):
        other = Call(Form(**{**vars(form), "lengths": lengths}), "cuda")
        for name, value in other.given.items():
            if isinstance(value, Tensor):
                given[name].copy_(value)
        graph.replay()
        wanted, _, caches = run(other)
        assert_same_bits(out, wanted, "out")
        assert_same_bits(given["k_cache"].cpu(), caches[0], "k_cache")


@pytest.mark.parametrize("page_size", [0, 16])
def test_opcheck(page_size: int) -> None:
    form = Form(page_size=page_size, new=1, options=MASKS["causal"], dtype=BF16)
    call = without_poison(form, "cuda")
    chosen = explain_with_cache(**call.given).chosen
    checked = arguments(call)._replace(backend=chosen)
    torch.library.opcheck(torch.ops.cute_attention.cached_forward.default, checked)
    torch.library.opcheck(torch.ops.cute_attention.cached_forward.output, checked)


def test_the_fallback_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_warned", [])
    call = Call(Form(options=MASKS["chunks"], dtype=BF16), "cuda")
    with pytest.warns(FallbackWarning, match="no kernel promises batch_invariant"):
        first = attention_with_cache(**call.given, batch_invariant=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = attention_with_cache(**call.given, batch_invariant=True)
    assert_same_bits(first, second, "out")
