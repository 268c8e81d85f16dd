"""flash_attn_func and its packed relatives, for sequences of one length."""

from __future__ import annotations

from torch import Tensor

from ...api import attention
from .arguments import WindowSize, options_of, renamed
from .attend import Results, attend
from .packed_tensors import parts_of


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention, with the arguments and results of flash-attn.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`.
        k: keys `[batch, seqlen_k, heads_kv, head_dim]`; `heads_kv` divides `heads`.
        v: values `[batch, seqlen_k, heads_kv, head_dim_v]`.
        dropout_p: share of the probabilities to drop, rounded to 256ths; the others are multiplied
            by `1 / (1 - dropout_p)`, which is not rounded. The seed comes from PyTorch's generator.
        softmax_scale: multiplies q·k; `head_dim ** -0.5` where None.
        causal: query `i` sees keys `j <= i + seqlen_k - seqlen_q`.
        window_size: `(left, right)`, in keys; a negative side is unbounded. With `causal`, the
            right side is 0.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; 0 for no cap.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`: adds `-slope * abs(i + seqlen_k -
            seqlen_q - j)` to the scores. They get no gradient.
        deterministic: ask for a backward that is bitwise repeatable.
        return_attn_probs: return `(out, softmax_lse, S_dmask)`.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]`, or with `return_attn_probs` also `softmax_lse
        [batch, heads, seqlen_q]`, float32, the natural logarithm of the softmax's denominator, and
        `S_dmask`: with dropout `[batch, heads, seqlen_q up to 128s, seqlen_k up to 128s]`, which
        holds `exp(score - the row's maximum)`, negative where it was dropped; else empty. A row
        that sees no key has output 0 and an LSE of -inf.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not agree, or a value out of range.
    """
    try:
        options = options_of(
            "flash_attn_func",
            softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        )  # fmt: skip
        if not dropout_p and not return_attn_probs:
            return attention(q, k, v, **options)
        return attend("flash_attn_func", q, k, v, (), dropout_p, options, return_attn_probs)
    except (TypeError, ValueError) as error:
        raise renamed("flash_attn_func", error) from None


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with keys and values in one tensor.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`.
        kv: `[batch, seqlen_k, 2, heads_kv, head_dim]`.
        dropout_p: as in `flash_attn_func`, like all that follows.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        What `flash_attn_func` does.
    """
    name = "flash_attn_kvpacked_func"
    try:
        options = options_of(
            name, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        k, v = parts_of(name, "kv", kv, 2, "[batch, seqlen_k, 2, heads_kv, head_dim]")
        return attend(name, q, k, v, (), dropout_p, options, return_attn_probs)
    except (TypeError, ValueError) as error:
        raise renamed(name, error, {"k": "kv", "v": "kv"}) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`.
        dropout_p: as in `flash_attn_func`, like all that follows.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        What `flash_attn_func` does.
    """
    name = "flash_attn_qkvpacked_func"
    try:
        options = options_of(
            name, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        q, k, v = parts_of(name, "qkv", qkv, 3, "[batch, seqlen, 3, heads, head_dim]")
        return attend(name, q, k, v, (), dropout_p, options, return_attn_probs)
    except (TypeError, ValueError) as error:
        raise renamed(name, error, {"q": "qkv", "k": "qkv", "v": "qkv"}) from None
