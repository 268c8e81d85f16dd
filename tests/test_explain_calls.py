"""explain_calls: what is said of calls that are made through each of the doors."""

from __future__ import annotations

import threading

import pytest
import torch

import cute_attention
from cute_attention import attention, attention_varlen, explain, explain_calls
from cute_attention.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cute_attention.flash_attn_interface import flash_attn_func as third_func
from cute_attention.inference import attention_with_cache, explain_with_cache

q = torch.randn(2, 5, 4, 16)
k = torch.randn(2, 7, 2, 16)
offsets = torch.tensor([0, 5, 10], dtype=torch.int32)


@pytest.mark.parametrize("function", [attention, flash_attn_func, third_func])
def test_dense(function) -> None:
    for _ in range(2):  # also where a plan is kept
        function(q, k, k, causal=True)
    with explain_calls() as calls:
        out = function(q, k, k, causal=True)
    assert calls == [explain(q, k, k, causal=True)]
    assert torch.equal(out, function(q, k, k, causal=True))


def test_packed_qkv() -> None:
    with explain_calls() as calls:
        flash_attn_qkvpacked_func(q.unsqueeze(2).expand(-1, -1, 3, -1, -1), 0.1)
    assert calls == [explain(q, q, q, dropout_p=0.1)]


def test_packed_sequences() -> None:
    rows = q.flatten(0, 1)
    packing = (offsets, offsets, 5, 5)
    with explain_calls() as calls:
        attention_varlen(rows, rows, rows, *packing)
        flash_attn_varlen_func(rows, rows, rows, *packing)
        flash_attn_varlen_func(rows, rows, rows, *packing, window_size=(3, 0))
    assert calls == [
        explain(rows, rows, rows, *packing),
        explain(rows, rows, rows, *packing, window=(3, 0)),
    ]


def test_cache() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    caches = torch.randn(2, 2, 16, 2, 16).unbind()
    with explain_calls() as calls:
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True)
        attention_with_cache(q, *caches, lengths, causal=True)
    assert calls == [explain_with_cache(q, *caches, lengths, causal=True)]
    assert "cache" in calls[0].call


def test_pytorch() -> None:
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("PyTorch registers flash attention from 2.11 on")
    from cute_attention.integrations import sdpa

    sdpa.activate()
    try:
        with explain_calls() as calls:
            heads_first = q.transpose(1, 2)
            torch.ops.aten._scaled_dot_product_flash_attention(*[heads_first] * 3, is_causal=True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert [call.call for call in calls] == [explain(q, q, q, causal=True).call]


def test_transformers() -> None:
    pytest.importorskip("transformers")
    import cute_attention.integrations.transformers as integration
    from small_transformers import make, tokens

    integration.register()
    model = make("mistral")
    model.set_attn_implementation("cute_attention")
    with explain_calls() as calls:
        model(tokens(), use_cache=False)
    assert len(calls) == 1  # its layers are alike
    assert "window" in calls[0].call


def test_calls_outside_and_of_other_threads_are_not_its_own() -> None:
    with explain_calls() as outer:
        attention(q, k, k)
        with explain_calls() as inner:
            attention(q, k, k, causal=True)
        thread = threading.Thread(target=attention, args=(q, k, k), kwargs={"softcap": 3.0})
        thread.start()
        thread.join()
    attention(q, k, k, scale=1.0)
    assert outer == [explain(q, k, k)]
    assert inner == [explain(q, k, k, causal=True)]


def test_lengths_and_errors_are_told() -> None:
    with explain_calls() as calls:
        attention(q, k, k)
        attention(q, q, q)
        with pytest.raises(cute_attention.BackendError):
            attention(q, k, k, backend="sm90")
    assert [call.chosen for call in calls] == ["reference", "reference", None]
    assert calls[0].call != calls[1].call


def test_compiled_code_is_not_disturbed() -> None:
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with explain_calls() as calls:
        out = compiled(q, k, k)
    assert calls == []
    assert torch.equal(out, attention(q, k, k))
