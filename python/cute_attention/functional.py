"""The public functions: `attention` and `attention_varlen`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from . import _check
from ._call import Options, attend, autocast, autocasts

Window = tuple[int | None, int | None]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
    backend: str = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, `softmax(scale * q k^T) v`, differentiable in q, k, v, bias and sink,
    through the output and the LSE.

    Every query head `h` reads kv head `h // (heads // heads_kv)`. A causal mask is aligned to the
    bottom right, so that the last query sees every key (1 where query i sees key j):

        seqlen_q 3, seqlen_k 5:  1 1 1 0 0      seqlen_q 5, seqlen_k 3:  0 0 0
                                 1 1 1 1 0                               0 0 0
                                 1 1 1 1 1                               1 0 0
                                                                         1 1 0
                                                                         1 1 1

    A row that sees no key has output 0, an LSE of -inf (of `sink` where there is one) and gradients
    0. There may be no heads. The full formula is in `cute_attention.attention_reference`. Second
    derivatives are not implemented. Under `torch.autocast` q, k, v and bias are cast, as those of
    `torch.nn.functional.scaled_dot_product_attention` are. A number may be a NumPy scalar, or
    symbolic, as under `torch.export`.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`, float16, bfloat16, float32 or float64. Any
            strides; those that a kernel cannot read are copied, and so are head dims that are no
            multiple of 8.
        k: keys `[batch, seqlen_k, heads_kv, head_dim]`, of q's dtype and on its device; `heads_kv`
            divides `heads`.
        v: values `[batch, seqlen_k, heads_kv, head_dim_v]`, likewise.
        causal: query `i` sees keys `j <= i + seqlen_k - seqlen_q`.
        window: `(left, right)`, in keys: query `i` sees keys `j` with `-left <= j - (i + seqlen_k -
            seqlen_q) <= right`; None is unbounded. With `causal`, `right` is 0.
        scale: multiplies q·k; `head_dim ** -0.5` where None.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None or 0 for no cap.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`: adds `-slope * abs(i + seqlen_k -
            seqlen_q - j)` to the scores. They have no gradient and may require none.
        bias: added to the scores; broadcastable to `[batch, heads, seqlen_q, seqlen_k]`, of q's
            dtype or float32.
        sink: float32 `[heads]`: a logit that joins the denominator of the softmax only.
        dropout_p: share of the probabilities to drop, rounded to 256ths, the others scaled up; 0
            draws nothing.
        dropout_seed: an int, or an int64 tensor of one element on q's device: the same seed drops
            the same. None draws one from PyTorch's generator of q's device, so that
            `torch.manual_seed` governs it.
        deterministic: ask for a backward that is bitwise repeatable, as
            `torch.use_deterministic_algorithms` does. The forward always is.
        return_lse: return `(out, lse)`.
        backend: "sm90", "sm80" or "reference" to force one; "auto" for what `use_backend` or the
            environment variable CUTE_ATTENTION_BACKEND says, or else the fastest that serves the
            call.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]` in q's dtype, contiguous. With `return_lse` the
        pair `(out, lse)`, where `lse [batch, heads, seqlen_q]` is the natural logarithm of the
        softmax's denominator, float32 (float64 where q is).

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, or a value out of range.
        BackendError: the backend that was forced does not serve the call; the message says why not.

    Example:
        >>> import torch
        >>> from cute_attention import attention
        >>> q = torch.randn(2, 16, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 32, 2, 64).unbind()
        >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 8, 16]))
        >>> out.sum().backward()
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _check.tensors("attention", q=q, k=k, v=v)
    if autocasts(q):
        q, k, v, bias = autocast(q, k, v, bias)
    _check.same_kind("attention", q, k, v)
    shape = _check.dense_shapes("attention", q, k, v)
    options = Options(
        causal, window, scale, softcap, alibi_slopes, bias, sink, dropout_p, dropout_seed,
        deterministic, return_lse, backend,
    )  # fmt: skip
    return attend("attention", (q, k, v), (None, None), shape, options)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
    backend: str = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over sequences of different lengths, packed one after the other.

    Sequence `b` is the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q, and likewise of k and
    v. It attends to itself only, exactly as `attention` of its rows would: masks, ALiBi and dropout
    count from its start. The causal mask of the whole, here with (seqlen_q, seqlen_k) of (2, 3) and
    (1, 1):

        1 1 0 .
        1 1 1 .
        . . . 1

    Rows after the last sequence, as CUDA graphs of one size need them, are not read; their output
    is 0, their LSE -inf, with a sink too, and their gradients 0.

    Args:
        q: queries `[total_q, heads, head_dim]`, float16, bfloat16, float32 or float64. Any strides;
            those that a kernel cannot read are copied.
        k: keys `[total_k, heads_kv, head_dim]`, of q's dtype and on its device; `heads_kv` divides
            `heads`.
        v: values `[total_k, heads_kv, head_dim_v]`, likewise.
        cu_seqlens_q: int32 `[batch + 1]` on q's device: 0, then where each sequence ends, the last
            at `total_q` or before. Lengths of zero are legal. The reference backend checks the
            values; kernels do not, since reading them on the host would wait for the GPU.
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: the longest sequence of q, or any larger int32. Where it is too small, the
            reference backend raises ValueError; with a kernel each row of the sequences that are
            longer is right or NaN.
        max_seqlen_k: likewise for k and v.
        causal: query `i` of a sequence sees its keys `j <= i + seqlen_k - seqlen_q`, with the
            lengths of the sequence.
        window: `(left, right)`, in keys: as in `attention`, per sequence; None is unbounded. With
            `causal`, `right` is 0.
        scale: multiplies q·k; `head_dim ** -0.5` where None.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None or 0 for no cap.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`, as in `attention`.
        bias: broadcastable to `[batch, heads, max_seqlen_q, max_seqlen_k]`, of q's dtype or
            float32; sequence `b` reads the first rows and columns of `bias[b]`.
        sink: float32 `[heads]`: a logit that joins the denominator of the softmax only.
        dropout_p: share of the probabilities to drop, rounded to 256ths, the others scaled up; 0
            draws nothing.
        dropout_seed: an int, or an int64 tensor of one element on q's device; None draws one, as in
            `attention`.
        deterministic: ask for a backward that is bitwise repeatable, as in `attention`.
        return_lse: return `(out, lse)`.
        backend: as in `attention`.

    Returns:
        `out [total_q, heads, head_dim_v]` in q's dtype, contiguous. With `return_lse` the pair
        `(out, lse)`, where `lse [heads, total_q]` is the natural logarithm of the softmax's
        denominator, float32 (float64 where q is).

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, or a value out of range.
        BackendError: the backend that was forced does not serve the call; the message says why not.

    Example:
        >>> import torch
        >>> from cute_attention import attention_varlen
        >>> q = k = v = torch.randn(6, 4, 32)
        >>> cu_seqlens = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
        >>> attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
        torch.Size([6, 4, 32])
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _check.tensors("attention_varlen", q=q, k=k, v=v)
    if autocasts(q):
        q, k, v, bias = autocast(q, k, v, bias)
    _check.same_kind("attention_varlen", q, k, v)
    totals = _check.packed_shapes("attention_varlen", q, k, v)
    offsets, longest = _check.cu_seqlens(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    shape = _check.Shape(cu_seqlens_q.shape[0] - 1, *longest, *totals[3:])
    options = Options(
        causal, window, scale, softcap, alibi_slopes, bias, sink, dropout_p, dropout_seed,
        deterministic, return_lse, backend,
    )  # fmt: skip
    return attend("attention_varlen", (q, k, v), offsets, shape, options)
