"""Pages that no query of a call sees may hold anything, also where the cache is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attention.inference import attention_with_cache
from paged_calls import Call, Form


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 64, 2**40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", ["chunk", "qv"])
def test_of_a_window(given: str, packed: bool, left: int) -> None:
    torch.manual_seed(0)
    form = Form(
        page_size=32, lengths=(256, 33, 300), queries=(1, 1, 1), packed=packed, heads=(4, 2),
        dims=(64, 64), options={"causal": True, "window": (left, 0)}, dtype=torch.bfloat16,
    )  # fmt: skip
    call = Call(form, "cuda")
    more: dict[str, Any] = {"attention_chunk": 2**20}
    if given == "qv":
        more = {"qv": torch.zeros_like(call.given["q"])}  # adds nothing to the scores
    scale = call.given["q"].shape[-1] ** -0.5
    out = attention_with_cache(**call.given, **more, scale=scale)
    expected, _, plain = call.expected()
    found = out if packed else out.flatten(0, 1)
    assert not found.isnan().any()
    limit = 3 * (plain.double() - expected).abs().max() + 1e-3
    assert (found.double() - expected).abs().max() <= limit
