"""_flash_attn_forward, _flash_attn_backward and their packed relatives, for other libraries.

Their parameters' names, order and defaults are those of flash-attn 2.8. Libraries for ring
attention read them with `inspect.getfullargspec`, which does not look behind decorators, so there
are none. None of the outputs has a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import attention, attention_varlen
from ...checks import tensors
from ...inference.spans import Spans, attend_spans, spans_of
from .arguments import options_of, renamed, sides_of
from .attend import Packing
from .dropout import check_dropout, draw_rng_state, ratio, rescaled, seed_of
from .gradients import gradients, row_sums
from .paged import attend_pages
from .softmax import BLOCK_SIZE_N, dense_softmax, packed_softmax
from .varlen import packing_of

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Outputs:
    """Output, LSE, S_dmask (empty unless `return_softmax` and dropout ask for it) and rng_state,
    int64 `[2]`, from which the backward drops the same."""
    name = "_flash_attn_forward"
    try:
        sides = sides_of(name, window_size_left, window_size_right)
        options = options_of(name, softmax_scale, causal, sides, softcap, alibi_slopes, False)
        tensors(name, q=q)

        def run(dropout: dict[str, Any]) -> tuple[Tensor, Tensor]:
            return attention(q, k, v, return_lse=True, **dropout, **options)

        def softmax(seed: Tensor) -> Tensor:
            return dense_softmax(q, k, options, dropout_p, seed)

        return _outputs(name, q, dropout_p, run, softmax if return_softmax else None)
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Outputs:
    """`_flash_attn_forward` of packed sequences; of each only the first `seqused_k` keys, without
    the first `leftpad_k`. Rows of no sequence are always zeros, as `zero_tensors` asks. num_splits
    is a hint of versions after 2.8, which changes nothing here."""
    name = "_flash_attn_varlen_forward"
    try:
        sides = sides_of(name, window_size_left, window_size_right)
        options = options_of(name, softmax_scale, causal, sides, softcap, alibi_slopes, False)
        packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        tensors(name, q=q)

        def run(dropout: dict[str, Any]) -> tuple[Tensor, Tensor]:
            given = {**options, **dropout}
            if block_table is not None:
                return attend_pages(
                    name, q, k, v, packing, block_table, given, leftpad_k, seqused_k
                )
            if leftpad_k is None and seqused_k is None:
                return attention_varlen(q, k, v, *packing, return_lse=True, **given)
            return _some_keys(q, k, v, packing, leftpad_k, seqused_k, given)

        def softmax(seed: Tensor) -> Tensor:
            return packed_softmax(q, k, packing, options, dropout_p, seed)

        parts = block_table, leftpad_k, seqused_k
        if dropout_p and any(part is not None for part in parts):
            raise ValueError(
                f"{name}: dropout_p is {dropout_p}, expected 0 with block_table, leftpad_k or "
                "seqused_k"
            )
        return _outputs(name, q, dropout_p, run, softmax if return_softmax else None)
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into dq, dk and dv, and returns the sums of dout * out over each row,
    float32 `[batch, heads, seqlen_q up to 128s]`."""
    name = "_flash_attn_backward"
    try:
        sides = sides_of(name, window_size_left, window_size_right)
        options = options_of(
            name, softmax_scale, causal, sides, softcap, alibi_slopes, deterministic
        )
        tensors_of = q, k, v, dout, out, softmax_lse
        _write_gradients(name, tensors_of, (), options, dropout_p, rng_state, (dq, dk, dv))
        return row_sums(dout, out, rounded_to=128)
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences. It returns float32 `[heads, total_q]`; gradients
    of rows of no sequence are always zeros, as `zero_tensors` asks."""
    name = "_flash_attn_varlen_backward"
    try:
        sides = sides_of(name, window_size_left, window_size_right)
        options = options_of(
            name, softmax_scale, causal, sides, softcap, alibi_slopes, deterministic
        )
        packing = packing_of(name, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        tensors_of = q, k, v, dout, out, softmax_lse
        _write_gradients(name, tensors_of, packing, options, dropout_p, rng_state, (dq, dk, dv))
        return row_sums(dout, out)
    except (TypeError, ValueError) as error:
        raise renamed(name, error) from None


# What libraries call that want upstream's registered ops where there are some. These functions call
# registered ops, so torch.compile traces them as they are.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(
    device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """How many keys of S_dmask are relative to one maximum: more than any row has."""
    return BLOCK_SIZE_N


@torch.no_grad()
def _outputs(
    name: str,
    q: Tensor,
    dropout_p: float,
    run: Callable[[dict[str, Any]], tuple[Tensor, Tensor]],
    softmax: Callable[[Tensor], Tensor] | None,
) -> Outputs:
    """What a forward returns: `run` takes the options of dropout, `softmax` the seed."""
    if not dropout_p:
        return *run({}), q.new_empty(0), q.new_empty(2, dtype=torch.int64)
    check_dropout(name, dropout_p)
    rng_state = draw_rng_state(q)
    seed = seed_of(rng_state)
    out, lse = run({"dropout_p": dropout_p, "dropout_seed": seed})
    s_dmask = q.new_empty(0) if softmax is None else softmax(seed)
    return rescaled(out, dropout_p), lse, s_dmask, rng_state


def _some_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    leftpad: Tensor | None,
    used: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention to a part of each sequence's keys."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    keys = spans_of(cu_seqlens_k, max_seqlen_k, used)
    if leftpad is not None:
        starts = torch.minimum(keys.starts + leftpad, keys.ends)
        keys = Spans(starts, keys.ends, keys.longest, 2 * max_seqlen_k)
    return attend_spans(q, k, v, spans_of(cu_seqlens_q, max_seqlen_q), keys, options)


@torch.no_grad()
def _write_gradients(
    name: str,
    tensors_of: tuple[Tensor, ...],
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    rng_state: Tensor | None,
    targets: tuple[Tensor | None, ...],
) -> None:
    """The gradients, with flash-attn's dropout, into those of `targets` that there are."""
    q, k, v, grad_out, out, lse = tensors_of
    if dropout_p:
        check_dropout(name, dropout_p)
        if rng_state is None:
            raise ValueError(f"{name}: rng_state is None, expected that of the forward's dropout")
        options = {**options, "dropout_p": dropout_p, "dropout_seed": seed_of(rng_state)}
        factor = ratio(dropout_p)
        if factor != 1.0:  # of O = factor * (our O), whose gradient is factor * grad_out
            grad_out, out = grad_out * factor, out / factor
    grads = gradients(q, k, v, packing, grad_out, out, lse, options)
    for target, grad in zip(targets, grads, strict=True):
        if target is not None:
            target.copy_(grad)
