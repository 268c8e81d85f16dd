"""PyTorch's own attention through our kernels, by PyTorch's own registration (from 2.11 on).

    import cute_attention.integrations.sdpa                      # registers the name, no more
    torch.nn.attention.activate_flash_attention_impl("cute_attention")
    torch.nn.attention.restore_flash_attention_impl()            # PyTorch's kernels again

While it is active, `torch.nn.functional.scaled_dot_product_attention`,
`torch.nn.attention.varlen.varlen_attn` and nested tensors use our kernels. PyTorch chooses as ever
between its backends. FLASH_ATTENTION and EFFICIENT_ATTENTION are ours then, for the calls that a
kernel of ours serves, forward and backward; for all others they are PyTorch's kernels as before.
CUDNN_ATTENTION, which PyTorch would prefer on some GPUs, is switched off by PyTorch's own flag, and
set to what it was by the restore; `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` still asks for it.

What is ours is registered for the dispatch key of the device, below autograd, as PyTorch's own
providers of flash attention do it. So autograd, torch.compile, checkpoints and DTensor see the
operators of PyTorch that they know.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from ..semantics.dropout import draw_seed
from . import below_autograd

NAME = "cute_attention"  # in PyTorch's list of implementations
_DEVICES = ("CUDA", "CPU")  # dispatch keys; PyTorch has no such kernels for the CPU
_LSE_ROWS = 32  # PyTorch's memory-efficient attention rounds the rows of its LSE up to this
_BIAS_COLUMNS = 16  # and the columns of the gradient of a mask to this


def register() -> None:
    """Adds "cute_attention" to the implementations that
    `torch.nn.attention.activate_flash_attention_impl` knows. Importing this module does it, too.

    Raises:
        RuntimeError: PyTorch is older than 2.11.
    """
    registration().register_flash_attention_impl(NAME, register_fn=_Active)


def activate() -> None:
    """Makes PyTorch's attention use our kernels, for the whole process.

    Raises:
        RuntimeError: PyTorch is older than 2.11.
    """
    register()
    registration().activate_flash_attention_impl(NAME)


def registration() -> Any:
    """`torch.nn.attention`, where it has implementations to register.

    Raises:
        RuntimeError: it has none.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"cute_attention.integrations.sdpa needs PyTorch 2.11 or newer, and this is "
            f"{torch.__version__}: torch.nn.attention has no register_flash_attention_impl "
            "(call cute_attention.attention instead)"
        )
    return torch.nn.attention


class _Active:
    """Our kernels in PyTorch's dispatcher, until `remove`."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        for device in _DEVICES:
            for name, function in _IMPLEMENTATIONS.items():
                if hasattr(torch.ops.aten, name):  # one of them is younger than 2.11
                    self._implement(name, function, device)
        self.cudnn_was_on = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _implement(self, name: str, function: Callable[..., Any], device: str) -> None:
        theirs = _kernel_of_pytorch(name, device)
        call = functools.partial(_ours_or_theirs, function, theirs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            self.library.impl(name, call, device, with_keyset=True)

    def remove(self) -> None:
        """What PyTorch calls to restore its own kernels."""
        if self.library is not None:
            self.library = None
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn_was_on)


def _kernel_of_pytorch(name: str, device: str) -> Any:
    try:
        return torch.library.get_kernel(f"aten::{name}", device)
    except RuntimeError:  # there is none
        return None


class _NotServed(NotImplementedError):
    """No kernel of ours serves a call. The message names the argument."""


def _ours_or_theirs(ours: Callable[..., Any], theirs: Any, keys: Any, *args: Any, **kw: Any) -> Any:
    """Ours where a kernel serves the call. Where none does: theirs, or the reference backend where
    PyTorch has no kernel either."""
    try:
        return ours(*args, **kw, only_kernels=theirs is not None)
    except _NotServed:
        if theirs is None:
            raise
    return theirs.call_boxed(keys, *args, **kw)


def _need_kernels(only_kernels: bool, *call: Any, **options: Any) -> None:
    if only_kernels and not below_autograd.kernels_serve(*call, **options):
        raise _NotServed("no kernel of cute_attention serves this call")


def _check(name: str, query: Tensor, key: Tensor, value: Tensor, heads_dim: int) -> None:
    """What PyTorch has not checked when it calls its operators, in its names."""
    for label, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name}: {label} has dtype {tensor.dtype}, expected {query.dtype} (of query)"
            )
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{name}: {label} has {tensor.dim()} dimensions, expected {query.dim()} (as query)"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{name}: key has head dim {key.shape[-1]}, expected {query.shape[-1]} (of query)"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{name}: value has shape {list(value.shape)}, expected "
            f"{[*key.shape[:-1], '*']} (as key)"
        )
    heads, heads_kv = query.shape[heads_dim], key.shape[heads_dim]
    if heads != heads_kv and (heads_kv == 0 or heads % heads_kv):
        raise ValueError(
            f"{name}: key has {heads_kv} heads, expected a number that divides the {heads} of query"
        )


# ---- scaled_dot_product_attention: [batch, heads, seqlen, head_dim]; causal from the top left


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
        _check(name, query, key, value, 1)
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


def _like(result: Tensor, model: Tensor) -> Tensor:
    """`result` with the strides that PyTorch's kernels give theirs: those of `model`. Compiled code
    relies on them."""
    like = torch.empty_like(model)
    return result if like.stride() == result.stride() else like.copy_(result)


def _sdpa_flash(
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
        raise _NotServed(f"{_SDPA}: return_debug_mask is not served by cute_attention")
    _need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed, state, unused = _random_state(dropout_p, query)
    out, lse = call.forward(seed)
    debug_mask = query.new_empty(0)
    sizes = query.shape[2], key.shape[2]
    return _like(out, query), lse, None, None, *sizes, state, unused, debug_mask


def _sdpa_flash_backward(
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
    _need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    grads = call.gradients(grad_out, out, logsumexp, _seed_of(dropout_p, philox_seed))
    models = {"q": query, "k": key, "v": value}
    return tuple(_like(grads[name], model) for name, model in models.items())


def _sdpa_efficient(
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
    _need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    out, lse = call.forward(seed)
    rows = lse.shape[2]
    if compute_log_sumexp:
        lse = torch.nn.functional.pad(lse, (0, -rows % _LSE_ROWS))
    else:
        lse = lse.new_empty(*lse.shape[:2], 0)
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, lse, zero if seed is None else seed[0], zero.clone()


def _sdpa_efficient_backward(
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
    _need_kernels(only_kernels, "attention", *call.tensors(), (), **call.options)
    seed = philox_seed.reshape(1) if dropout_p > 0 else None
    grads = call.gradients(grad_out_, out, logsumexp, seed)
    grad_bias = None
    if attn_bias is not None and grad_input_mask[3]:
        *sizes, columns = attn_bias.shape
        grad_bias = attn_bias.new_zeros(*sizes, columns + -columns % _BIAS_COLUMNS)[..., :columns]
        grad_bias[..., : grads["bias"].shape[-1]] = grads["bias"].reshape(*sizes, -1)
    return grads["q"], grads["k"], grads["v"], grad_bias


# ---- varlen_attn and nested tensors: packed [total, heads, head_dim], or dense [batch, seqlen,
# heads, head_dim]; causal from the bottom right, as here


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # a hint, and changes no result
    only_kernels: bool,
) -> tuple[Any, ...]:
    refused = {
        "return_debug_mask": return_debug_mask or None,
        "seqused_k": seqused_k,
        "block_table": block_table,
    }
    for label, value_of in refused.items():
        if value_of is not None:
            raise _NotServed(f"{_VARLEN}: {label} is not served by cute_attention")
    call = _flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    options = _flash_options(is_causal, scale, window_size_left, window_size_right, dropout_p)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    _need_kernels(only_kernels, *call, **options)
    seed, state, unused = _random_state(dropout_p, query)
    out, lse = below_autograd.forward(*call, **options, dropout_seed=seed)
    return _like(out, query), lse, state, unused, query.new_empty(0)


def _flash_into(
    out: Tensor, *args: Any, only_kernels: bool, **options: Any
) -> Tensor:  # varlen_attn_out
    result, lse, *_ = _flash(*args, **options, only_kernels=only_kernels)
    out.copy_(result)
    return lse


def _flash_backward(
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
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    only_kernels: bool,
) -> tuple[Tensor, ...]:
    call = _flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    options = _flash_options(is_causal, scale, window_size_left, window_size_right, dropout_p)
    _need_kernels(only_kernels, *call, **options)
    grads = below_autograd.gradients(
        *call,
        grad_out=grad_out,
        out=out.contiguous(),
        lse=logsumexp.contiguous(),
        **options,
        dropout_seed=_seed_of(dropout_p, rng_state),
    )
    models = {"q": query, "k": key, "v": value}
    return tuple(_like(grads[name], model) for name, model in models.items())


def _flash_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> tuple[Any, ...]:
    """The name of our function, q, k and v, and how they are packed."""
    _check(_VARLEN, query, key, value, -2)
    if cum_seq_q is None:
        return "attention", query, key, value, ()
    offsets = []
    for label, tensor in (("cu_seq_q", cum_seq_q), ("cu_seq_k", cum_seq_k)):
        if tensor is None or tensor.dtype != torch.int32:
            came = "None" if tensor is None else f"of dtype {tensor.dtype}"
            raise TypeError(f"{_VARLEN}: {label} is {came}, expected a tensor of torch.int32")
        offsets.append(tensor)
    return "attention_varlen", query, key, value, (*offsets, max_q, max_k)


def _flash_options(
    is_causal: bool,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
) -> dict[str, Any]:
    sides = [None if side is None or side < 0 else side for side in (window_left, window_right)]
    return {"causal": is_causal, "scale": scale, "window": tuple(sides), "dropout_p": dropout_p}


def _random_state(dropout_p: float, query: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """A seed from PyTorch's generator of the device, where one is needed, and what stands for it
    among the results, which have the shapes and dtypes of PyTorch's."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    seed = None
    if dropout_p > 0:
        seed = draw_seed(query.device)
        state[:1] = seed
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return seed, state.view(torch.uint64), unused


def _seed_of(dropout_p: float, state: Tensor) -> Tensor | None:
    return state.view(torch.int64)[:1] if dropout_p > 0 else None


_SDPA = "scaled_dot_product_attention"
_VARLEN = "varlen_attn"
_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
    "_scaled_dot_product_efficient_attention": _sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_into,
    "_flash_attention_backward": _flash_backward,
}

if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    register()
