"""The public functions: `attention` and `attention_varlen`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # which torch depends on

from .call import attend
from .options import AllOptions, Options, documented


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@documented
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Unpack[AllOptions],
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
        **options: those of `Options` in options.py.

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
    return attend("attention", q, k, v, (), options)


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
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
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
    return_lse: Literal[True],
    **options: Unpack[Options],
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
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@documented
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Unpack[AllOptions],
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

    The lengths in the meaning of an option are those of each sequence. A bias is broadcastable to
    `[batch, heads, max_seqlen_q, max_seqlen_k]`: sequence `b` reads the first rows and columns of
    `bias[b]`.

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
        **options: those of `Options` in options.py.

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
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend("attention_varlen", q, k, v, packing, options)
