"""Calls of latent attention (MLA) in its absorbed form: one KV head, and values that are the first
columns of keys. What may not be read is poisoned (`paged_calls.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_calls import Call, Form

ROPE, LATENT = 64, 512  # columns of keys alone, and of keys and values


def latent_form(queries: int = 1, heads: int = 16, **changes: Any) -> Form:
    """A causal call; `dims` are the columns of keys alone, and of both."""
    options = {"causal": True, **changes.pop("options", {})}
    form = Form(dims=(ROPE, LATENT), heads=(heads, 1), queries=(queries,) * 4, options=options)
    return replace(form, **changes)


def latent_call(form: Form, device: str = "cuda") -> Call:
    """Queries and keys with all columns; `v_cache` is a view of `k_cache`."""
    rope, latent = form.dims
    call = Call(replace(form, dims=(rope + latent, 8)), device)
    call.keys[1] = [keys[..., :latent] for keys in call.keys[0]]
    call.given["v_cache"] = call.given["k_cache"][..., :latent]
    return call


def with_qv(call: Call, apart: bool = False) -> dict[str, Any]:
    """The same call in the form with `qv`: caches that are views, or tensors `apart`."""
    latent = call.given["v_cache"].shape[-1]
    q, cache = call.given["q"], call.given["k_cache"]
    caches = {"k_cache": cache[..., latent:], "v_cache": cache[..., :latent]}
    if apart:
        caches = {name: tensor.contiguous() for name, tensor in caches.items()}
    return {**call.given, **caches, "q": q[..., latent:], "qv": q[..., :latent]}
