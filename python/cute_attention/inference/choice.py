"""Which backend serves a call with a KV cache, and why: the choice, and `explain_with_cache`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..arguments import feature_words, kind_of, problem_of
from ..cache_arguments import CACHE, QV, CacheArguments
from ..dispatch.backends import Report
from ..dispatch.explain import Explanation, explain_problem
from ..dispatch.request import check_name, requested_backend, requested_rows
from ..dispatch.select import select
from ..errors import BackendError, FallbackWarning
from ..ops.cache import KERNELS, MOST_SPLITS, REFERENCE, CachedFamily
from ..options import documenting
from ..problem import Problem
from .checked import NAME, checked_cache
from .in_place import obstacle
from .latent import with_qv
from .options import DEFAULTS, AllCacheOptions, CacheOptions, with_defaults

_NOT_INVARIANT = "no kernel promises batch_invariant"
_warned: list[object] = []


def choose(call: CacheArguments) -> tuple[CachedFamily, str]:
    """The ops that serve a call, and the backend that they are told, or the kernel that `rows.use`
    asks for.

    Where the cache is read where it lies, kernels serve that read a cache. Where it is packed,
    those serve that serve `attention` to the same queries and keys (`lowered.py`), which then finds
    the kernel that is asked for itself.

    Raises:
        BackendError: the backend or the kernel that was asked for does not serve the call.
    """
    check_name(NAME, "backend", call.backend)
    requested = requested_backend(call.backend)
    row, _ = requested_rows(NAME, None)
    reason = _not_invariant(call)
    if reason and (row or requested not in ("auto", "reference")):
        asked = f"kernel {row!r}" if row else f"backend {requested!r}"
        raise BackendError(f"{NAME}: {asked} cannot serve this call: {reason}")
    backend = select(requested, *_kind(call)._replace(row=row))
    if reason and backend != "reference":
        _warn_of_fallback(reason)
        backend = "reference"
    if backend == "reference":
        return REFERENCE, backend
    return KERNELS, row if row and not obstacle(call) else backend


def _not_invariant(call: CacheArguments) -> str:
    """Why kernels do not keep the promise of `batch_invariant`, where a call asks for it: they do
    for a cache that they read where it lies."""
    reason = obstacle(call) if call.batch_invariant else ""
    return f"{_NOT_INVARIANT} with {reason}" if reason else ""


def _warn_of_fallback(reason: str) -> None:
    mine = object()
    _warned.append(mine)
    if _warned[0] is mine:  # threads may race
        warnings.warn(
            f"{NAME}: no kernel serves this call, so the slower reference backend does "
            f"({reason}); backend='reference' silences this",
            FallbackWarning,
            stacklevel=5,
        )


_warn_of_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in request.py


def _kind(call: CacheArguments) -> Problem:
    call = with_qv(call)
    kind = kind_of(call.as_attention())
    if not obstacle(call):
        return kind._replace(features=kind.features | CACHE | (0 if call.qv is None else QV))
    if call.qv is None:
        return kind
    return kind._replace(head_dim=kind.head_dim + kind.head_dim_v)


@documenting(CacheOptions, AllCacheOptions, DEFAULTS)
def explain_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    **options: Unpack[AllCacheOptions],
) -> Explanation:
    """For a call of `attention_with_cache`: what every backend and every kernel says to it, and
    which one runs. Computes nothing, writes nothing and never falls back. A causal mask with 2
    queries and 3 keys:

        1 1 0
        1 1 1

    Args:
        q: as in `attention_with_cache`, like all that follows.
        k_cache: see there.
        v_cache: see there.
        cache_seqlens: see there.
        **options: those of `CacheOptions` in options.py.

    Returns:
        An `Explanation`, as `cute_attention.explain` returns; there is no backward.

    Raises:
        TypeError: as the call would.
        ValueError: as the call would, but that no tensor's values are read.

    Example:
        >>> import torch
        >>> from cute_attention.inference import explain_with_cache
        >>> q, cache = torch.randn(1, 1, 4, 64), torch.zeros(1, 32, 2, 64)
        >>> explain_with_cache(q, cache, cache, 7, causal=True).chosen
        'reference'
    """
    name = "explain_with_cache"
    call = checked_cache(q, k_cache, v_cache, cache_seqlens, with_defaults(name, {**options}))
    return explain_checked_cache(call)


def explain_checked_cache(call: CacheArguments) -> Explanation:
    """`explain_with_cache` for checked arguments."""
    check_name(NAME, "backend", call.backend)
    kind = _kind(call)
    problem = problem_of(call.as_attention())._replace(
        head_dim=kind.head_dim,
        features=kind.features,
        seqlen_k=min(call.max_seqlen_k or call.room, call.room),
    )
    if obstacle(call):  # sequences are packed then, and keys divided as kernels choose
        problem = problem._replace(total_q=prod(call.q.shape[:-2]))
    else:
        problem = problem._replace(
            num_splits=min(call.num_splits, MOST_SPLITS), batch_invariant=call.batch_invariant
        )
    words = [*feature_words(call.as_attention()), "cache", *_words(call)]
    row, _ = requested_rows(NAME, None)
    found = explain_problem(problem, call.backend, words, (row, ""))
    found = replace(found, chosen_backward="", backward=())
    reason = _not_invariant(call)
    if not reason:
        if found.chosen in (None, "reference"):
            return found
        return replace(found, call=f"{found.call}, {_way(call)}")
    asked = found.requested.split()[0]
    reports = [
        report if report.backend == "reference" else Report(report.backend, False, (reason,))
        for report in found.forward
    ]
    chosen = "reference" if asked in ("auto", "reference") and not row else None
    return replace(found, forward=tuple(reports), chosen=chosen)


def _way(call: CacheArguments) -> str:
    """How a kernel gets at the cache, in words."""
    reason = obstacle(call)
    return f"cache packed for the kernel ({reason})" if reason else "cache read in place"


def _words(call: CacheArguments) -> list[str]:
    """What a call with a cache has that `attention` does not know, in words."""
    names: dict[str, Any] = {
        "append": call.k,
        "pages": call.block_table,
        "rotary": call.rotary_cos,
        "leftpad": call.leftpad,
        "cache_batch_idx": call.cache_batch_idx,
        "qv": call.qv,
    }
    words = [word for word, value in names.items() if value is not None]
    if with_qv(call) is not call:
        words.append("values in k_cache")
    if call.attention_chunk:
        words.append(f"chunks of {call.attention_chunk}")
    if call.batch_invariant:
        words.append("batch_invariant")
    return words
