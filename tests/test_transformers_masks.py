"""The masks that we make for transformers, and calls of our attention with those of others."""

from __future__ import annotations

import warnings

import pytest
import torch

from cute_attention import FallbackWarning
from cute_attention.integrations import masks
from cute_attention.integrations import transformers as integration
from small_transformers import NEW_ENOUGH, PADDING, VERSION, transformers

pytestmark = NEW_ENOUGH
LEFT_PADDING = PADDING["left"].bool()


def mask_of(function, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, **others):
    sizes = {"q_length": q_length, "q_offset": q_offset}
    if VERSION < (5, 0):
        sizes = {"cache_position": torch.arange(q_length) + q_offset}
    return masks.mask(
        batch_size=2,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        **sizes,
        **others,
    )


def test_no_mask_where_none_is_needed():
    from transformers import masking_utils as theirs

    causal, window = theirs.causal_mask_function, theirs.sliding_window_causal_mask_function
    ones = torch.ones(2, 12, dtype=torch.bool)
    assert mask_of(causal, 12, 12) is None
    assert mask_of(causal, 12, 12, attention_mask=ones) is None
    assert mask_of(causal, 1, 12, q_offset=11, attention_mask=ones) is None
    assert mask_of(window(12), 12, 12) is None
    note = masks.note_of(mask_of(window(11), 12, 12))
    assert note == masks.Note(masks.Pattern(True, 10, None), whole=True)
    static = mask_of(causal, 4, 32, q_offset=2)
    assert static.shape == (2, 6)
    assert static.all()
    padded = mask_of(causal, 4, 32, q_offset=8, attention_mask=LEFT_PADDING)
    assert torch.equal(padded, LEFT_PADDING)


def test_a_mask_that_no_kernel_serves_is_named_once(monkeypatch):
    from transformers import masking_utils as theirs

    monkeypatch.setattr(masks, "_warned", set())
    function = theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    with pytest.warns(FallbackWarning, match="chunked_overlay.* of llama4"):
        mask = mask_of(
            function, 12, 12, config=transformers.Llama4TextConfig(), device=torch.device("cpu")
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = mask_of(function, 12, 12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    expected = (j <= i) & (i // 4 == j // 4)
    assert torch.equal(mask, expected.expand(2, 1, 12, 12))
    assert torch.equal(again, mask)
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64).unbind()
    out = integration.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    torch.testing.assert_close(out, want)


def test_masks_of_anybodys_making():
    """Four dimensions, bool or added; keys beyond the mask are not seen."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64).unbind()
    seen = torch.rand(2, 1, 6, 7) > 0.3
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :7], v[:, :, :7], seen, enable_gqa=True
    )
    for mask in (seen, added):
        out = integration.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
        torch.testing.assert_close(out, want.transpose(1, 2))


def test_what_is_not_served_is_refused_by_name():
    q = torch.randn(1, 2, 8, 8)
    module = torch.nn.Module()
    with pytest.raises(NotImplementedError, match=r"head_mask is a torch\.Tensor, expected None"):
        integration.attention_forward(module, q, q, q, None, head_mask=torch.ones(2))
    bias = torch.zeros(1, 2, 8, 8)
    ids = torch.zeros(1, 8, dtype=masks.IDS)
    with pytest.raises(NotImplementedError, match="position_bias is given for several sequences"):
        integration.attention_forward(module, q, q, q, ids, position_bias=bias)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[8\], expected \[batch"):
        integration.attention_forward(module, q, q, q, torch.ones(8))
    with pytest.warns(UserWarning, match="output_attentions has no effect"):
        integration.attention_forward(module, q, q, q, None, output_attentions=True)
