"""A call with flash-attn's dropout and results, for sequences of one length and packed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...api import attention, attention_varlen
from ...checks import tensors
from .dropout import check_dropout, draw_rng_state, rescaled, seed_of
from .softmax import dense_softmax, packed_softmax

Results = Tensor | tuple[Tensor, Tensor, Tensor]
Packing = tuple[Tensor, Tensor, int, int]


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | tuple[()],
    dropout_p: float,
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Results:
    """`attention_varlen`, or `attention` where there is no packing; without `return_attn_probs` the
    output alone."""
    function: Callable[..., Any] = attention_varlen if packing else attention
    if not dropout_p:
        if not return_attn_probs:
            return function(q, k, v, *packing, **options)
        out, lse = function(q, k, v, *packing, return_lse=True, **options)
        return out, lse, q.new_empty(0)
    check_dropout(name, dropout_p)
    if not return_attn_probs:
        out = function(q, k, v, *packing, dropout_p=dropout_p, **options)
        return rescaled(out, dropout_p)
    tensors(name, q=q)
    seed = seed_of(draw_rng_state(q))
    dropped = {**options, "dropout_p": dropout_p, "dropout_seed": seed}
    out, lse = function(q, k, v, *packing, return_lse=True, **dropped)
    if packing:
        softmax = packed_softmax(q, k, packing, options, dropout_p, seed)
    else:
        softmax = dense_softmax(q, k, options, dropout_p, seed)
    return rescaled(out, dropout_p), lse, softmax
