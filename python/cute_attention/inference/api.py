"""`attention_with_cache`: attention to a cache of keys and values, which it extends in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..dispatch.record import is_recorded
from ..ops.cache import KERNELS
from ..options import documenting
from . import plans
from .checked import NAME, checked_cache
from .choice import choose, explain_checked_cache
from .options import DEFAULTS, AllCacheOptions, CacheOptions, with_defaults


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> Tensor: ...


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: bool,
    **options: Unpack[CacheOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@documenting(CacheOptions, AllCacheOptions, DEFAULTS)
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    **options: Unpack[AllCacheOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the keys and values of a cache, to which new ones may be appended first.

    Sequence `b` has `n = cache_seqlens[b]` tokens in the cache, plus its new ones where `k` and `v`
    are given, less `leftpad[b]`. Its queries stand at its last tokens: with a causal mask, 3
    queries and 5 tokens in all (1 where query i sees token j)

        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1

    The cache is contiguous, with room for as many tokens in each row, or of pages. What lies in it
    beyond the tokens of a sequence is not read, and may be anything, NaN included; so may pages in
    which a window or a chunk shows the queries no key, and table entries for them. The sequence's
    own tokens have to be finite, also where a mask hides them. Nothing is read on the host but
    where the reference backend runs, so a CUDA graph that a kernel serves can be replayed with
    other lengths. There is no gradient.

    A position that a sequence of the call writes may not be among those that another sequence of
    the call reads or writes: it may be read before or after it is written, and of two tokens at one
    place either may be there afterwards. Other sequences are right all the same. Full pages that
    are only read may be shared, as may the other tokens of a page.

    Lengths and tables are checked where they are read: by the reference backend on every device. A
    kernel cannot raise: new tokens for which there is no room, or no page, are not written, and
    rows of a sequence that is longer than its room are right or NaN. A position without an angle
    takes the last.

    Args:
        q: queries `[batch, seqlen_q, heads, head_dim]`, or with `cu_seqlens_q` packed `[total_q,
            heads, head_dim]`; float16, bfloat16, float32 or float64.
        k_cache: `[rows, room, heads_kv, head_dim]` with a row for each sequence; with a
            `block_table` `[pages, page_size, heads_kv, head_dim]`. For a kernel page_size is a
            multiple of 16. On q's device, and of its dtype or float8_e4m3fn, which is copied in
            q's dtype.
        v_cache: likewise, with a head dim of its own. It may be a view of `k_cache`, whose first
            columns are then the values: with more than 256 columns a kernel for latent attention
            reads them once.
        cache_seqlens: how many tokens of each sequence are in the cache before the call, padding on
            the left included: int32 `[batch]` on q's device, or an int for all; None for all that
            there is room for.
        **options: those of `CacheOptions` in options.py.

    Returns:
        `out [batch, seqlen_q, heads, head_dim_v]`, packed `[total_q, heads, head_dim_v]`, in q's
        dtype, contiguous. With `return_lse` the pair `(out, lse)`, where `lse [batch, heads,
        seqlen_q]`, packed `[heads, total_q]`, is the natural logarithm of the softmax's
        denominator, float32 (float64 where q is). A row that sees no key has output 0 and an LSE of
        -inf (of `sink` where there is one).

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, a value out of range, or a tensor that
            requires a gradient while gradients are recorded.
        PageError: a table that is too short for a sequence, or names no page where one is needed.
        BackendError: the backend that was forced does not serve the call; the message says why not.

    Example:
        >>> import torch
        >>> from cute_attention.inference import attention_with_cache
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 2, 32).unbind()
        >>> cache_seqlens = torch.tensor([5, 9], dtype=torch.int32)
        >>> q, k, v = torch.randn(2, 1, 8, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
        >>> out = attention_with_cache(q, k_cache, v_cache, cache_seqlens, k=k, v=v, causal=True)
        >>> out.shape, bool((k_cache[1, 9] == k[1, 0]).all())
        (torch.Size([2, 1, 8, 32]), True)
    """
    if torch.compiler.is_dynamo_compiling():
        return _attend_checked(None, (q, k_cache, v_cache, cache_seqlens), options)
    if _autocast_is_on():
        q, options = plans.as_cast(q, options)  # type: ignore[assignment]
    tensors = q, k_cache, v_cache, cache_seqlens
    key = plans.key_of(tensors, options)
    plan = plans.plans.get(key)
    if plan is not None:
        try:
            if plan.is_direct:
                return plan.op(*tensors, plan.text, *map(options.get, plan.names))
            return plans.run(plan, tensors, options)
        except (RuntimeError, IndexError):  # the checks say why, or the op again
            pass
    return _attend_checked(key, tensors, options)


_autocast_is_on = torch._C._is_any_autocast_enabled


def _attend_checked(
    key: tuple[Any, ...] | None, tensors: tuple[Any, Any, Any, Any], options: Mapping[str, Any]
) -> Any:
    """The long way for q, k_cache, v_cache and cache_seqlens. `key` is that of a plan for the next
    call of the kind; None for none."""
    given = with_defaults(NAME, {**options})
    call = checked_cache(*tensors, given)
    is_explained = is_recorded(explain_checked_cache, call)
    ops, backend = choose(call)
    call = call._replace(backend=backend)
    if key is not None and ops is KERNELS and not is_explained:
        plans.remember(key, call, type(tensors[3]) is int, options, given["return_lse"])
    op = ops.forward if given["return_lse"] else ops.output
    with torch.no_grad():
        return op(*call)
