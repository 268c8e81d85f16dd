"""PyTorch's operators of `scaled_dot_product_attention`: [batch, heads, seqlen, head_dim]; causal
from the top left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...semantics.dropout import draw_seed
from .. import below_autograd
from .shared import NotServed, check, like, need_kernels, random_state, seed_of

_SDPA = "scaled_dot_product_attention"
_LSE_ROWS = 32  # PyTorch's memory-efficient attention rounds the rows of its LSE up to this
_BIAS_COLUMNS = 16  # and the columns of the gradient of a mask to this


class _Dense:
    """A call of `scaled_dot_product_attention` in our layout and our options."""

    def __init__(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        check(name, query, key, value, 1)
        self.query, self.key, self.value, self.mask = query, key, value, mask
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        # Query i sees the keys up to i, and ours, counted from the bottom right, those up to
        # i + seqlen_k - seqlen_q + the window's right side. Keys from seqlen_q on are never seen.
        self.keys = min(seqlen_q, seqlen_k) if is_causal else seqlen_k
        self.options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
        if is_causal:
            self.options["window"] = (None, seqlen_q - self.keys)
        if mask is not None:
            self.options["bias"] = mask[..., : self.keys] if mask.shape[-1] > 1 else mask

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, `[batch, seqlen, heads, head_dim]`."""
        key, value = self.key[:, :, : self.keys], self.value[:, :, : self.keys]
        return self.query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def forward(self, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output, `[batch, heads, seqlen_q, head_dim_v]`, and the LSE."""
        out, lse = below_autograd.forward(
            "attention", *self.tensors(), (), **self.options, dropout_seed=seed
        )
        return out.transpose(1, 2), lse

    def gradients(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None
    ) -> dict[str, Tensor]:
        """Of q, k, v and bias, in PyTorch's layout."""
        grads = below_autograd.gradients(
            "attention",
            *self.tensors(),
            (),
            grad_out=grad_out.transpose(1, 2),
            out=out.transpose(1, 2).contiguous(),
            lse=lse[:, :, : self.query.shape[2]].contiguous(),
            **self.options,
            dropout_seed=seed,
        )
        found = {name: grads[name].transpose(1, 2) for name in "qkv"}
        for name, whole in (("k", self.key), ("v", self.value)):
            if self.keys < whole.shape[2]:
                unseen = whole.shape[2] - self.keys
                found[name] = torch.nn.functional.pad(found[name], (0, 0, 0, unseen))
        if self.mask is not None:
            found["bias"] = grads["bias"]
        return found


def sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    only_kernels: bool,
) -> tuple[Any, ...]:
    call = _Dense(_SDPA, query, key, value, None, dropout_p, is_causal, scale)
    if return_debug_mask:
        raise NotServed(f"{_SDPA}: return_debug_mask is not served by cute_attention")
    need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed, state, unused = random_state(dropout_p, query)
    out, lse = call.forward(seed)
    debug_mask = query.new_empty(0)
    sizes = query.shape[2], key.shape[2]
    return like(out, query), lse, None, None, *sizes, state, unused, debug_mask


def sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    only_kernels: bool,
) -> tuple[Tensor, ...]:
    call = _Dense(_SDPA, query, key, value, None, dropout_p, is_causal, scale)
    need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    grads = call.gradients(grad_out, out, logsumexp, seed_of(dropout_p, philox_seed))
    models = {"q": query, "k": key, "v": value}
    return tuple(like(grads[name], model) for name, model in models.items())


def sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    only_kernels: bool,
) -> tuple[Any, ...]:
    call = _Dense(_SDPA, query, key, value, attn_bias, dropout_p, is_causal, scale)
    need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    out, lse = call.forward(seed)
    rows = lse.shape[2]
    if compute_log_sumexp:
        lse = torch.nn.functional.pad(lse, (0, -rows % _LSE_ROWS))
    else:
        lse = lse.new_empty(*lse.shape[:2], 0)
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, lse, zero if seed is None else seed[0], zero.clone()


def sdpa_efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
    only_kernels: bool,
) -> tuple[Tensor | None, ...]:
    call = _Dense(_SDPA, query, key, value, attn_bias, dropout_p, is_causal, scale)
    need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed = philox_seed.reshape(1) if dropout_p > 0 else None
    grads = call.gradients(grad_out_, out, logsumexp, seed)
    grad_bias = None
    if attn_bias is not None and grad_input_mask[3]:
        *sizes, columns = attn_bias.shape
        grad_bias = attn_bias.new_zeros(*sizes, columns + -columns % _BIAS_COLUMNS)[..., :columns]
        grad_bias[..., : grads["bias"].shape[-1]] = grads["bias"].reshape(*sizes, -1)
    return grads["q"], grads["k"], grads["v"], grad_bias
