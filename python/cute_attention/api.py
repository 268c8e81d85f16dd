"""The public functions: `attention` and `attention_varlen`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # torch depends on typing_extensions, so it is there

from .call import attend
from .options import AllOptions, Options, documented


# The overloads tell editors and type checkers what each value of `return_lse` returns. Python has
# no way to give a list of positional arguments a name, so each overload repeats these arguments.
# The options are written once, in options.py.
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
    """Exact attention, `softmax(scale * q k^T) v`. The output and the LSE are differentiable in q,
    k, v, bias and sink.

    Every query head `h` reads kv head `h // (heads // heads_kv)`. A causal mask is aligned to the
    bottom right, so that the last query sees every key (1 where query i sees key j):

        seqlen_q 3, seqlen_k 5:  1 1 1 0 0      seqlen_q 5, seqlen_k 3:  0 0 0
                                 1 1 1 1 0                               0 0 0
                                 1 1 1 1 1                               1 0 0
                                                                         1 1 0
                                                                         1 1 1

    A row that sees no key has output 0, an LSE of -inf (of `sink` where there is one) and gradients
    0. What a mask hides in a sequence has to be finite, and then changes nothing: kernels multiply
    it by an exact 0, so NaN there may reach other rows of the sequence, but of no other one. Zero
    heads are legal. The full formula is in `cute_attention.attention_reference`. Second derivatives
    are not implemented. Under `torch.autocast` q, k, v and bias are cast as
    `torch.nn.functional.scaled_dot_product_attention` casts them. A number may be a NumPy scalar,
    or a symbolic number, as under `torch.export`.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`, float16, bfloat16, float32 or float64, with
            any strides. For a kernel, q, k and v are copied if it cannot read their strides, or if
            a head dim is not a multiple of 8.
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

    Sequence `b` has the rows of q from `cu_seqlens_q[b]` to before `cu_seqlens_q[b + 1]`, and
    likewise rows of k and v. Its queries see only its own keys, and the result is that of
    `attention` of these rows: masks, ALiBi and dropout count from the start of the sequence. The
    causal mask of two sequences, with (seqlen_q, seqlen_k) of (2, 3) and (1, 1):

        1 1 0 .
        1 1 1 .
        . . . 1

    There may be rows after the last sequence, which CUDA graphs of a fixed size need. They are not
    read. Their output is 0, their LSE is -inf even if there is a sink, and their gradients are 0.

    Where the meaning of an option names a length, it is the length of each sequence. A bias must be
    broadcastable to `[batch, heads, max_seqlen_q, max_seqlen_k]`: sequence `b` reads the first rows
    and columns of `bias[b]`.

    Args:
        q: queries `[total_q, heads, head_dim]`, float16, bfloat16, float32 or float64, with any
            strides. For a kernel, q, k and v are copied if it cannot read their strides, or if a
            head dim is not a multiple of 8.
        k: keys `[total_k, heads_kv, head_dim]`, of q's dtype and on its device; `heads_kv` divides
            `heads`.
        v: values `[total_k, heads_kv, head_dim_v]`, likewise.
        cu_seqlens_q: int32 `[batch + 1]` on q's device: 0, and then the row at which each sequence
            ends, which is at most `total_q`. Lengths of zero are legal. The reference backend
            checks the values. With a kernel nobody does: to read them, the host would have to wait
            for the GPU.
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: the length of the longest sequence of q, or any larger int32. If it is too
            small, the reference backend raises ValueError. With a kernel each row of a longer
            sequence is then right or NaN.
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
