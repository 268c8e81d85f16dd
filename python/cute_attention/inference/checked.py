"""From what a user passes to `CacheArguments`: checks, defaults, lengths as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..arguments import CHECKS
from ..cache_arguments import CacheArguments
from ..checked import as_autocast_does
from ..semantics.fp8 import FP8
from ..shapes import DTYPES

NAME = "attention_with_cache"
_DENSE = "[batch, seqlen, heads, head_dim]"
_PACKED = "[total, heads, head_dim]"


def checked_cache(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, given: dict[str, Any]
) -> CacheArguments:
    """The arguments of `attention_with_cache`, checked and in one form.

    No tensor's values are read: the reference backend checks lengths and tables.

    Args:
        q: queries.
        k_cache: the cache of keys.
        v_cache: that of values.
        cache_seqlens: how many tokens are cached; None for as many as there is room for.
        given: all options of `attention_with_cache` by name.

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, or a value out of range.
    """
    checks.tensors(NAME, q=q, k_cache=k_cache, v_cache=v_cache)
    names = ("k", "v", "qv")
    q, *others = as_autocast_does(q.device, (q, *(given[name] for name in names)))
    given = {**given, **dict(zip(names, others, strict=True))}
    _check_tensors(q, k_cache, v_cache, given)
    for label in ("causal", "rotary_interleaved", "batch_invariant", "return_lse"):
        checks.flag(NAME, label, given[label])
    left, right = checks.window_sides(NAME, given["causal"], given["window"])
    head_dim = q.shape[-1] + (0 if given["qv"] is None else v_cache.shape[-1])
    scale, max_seqlen_q = given["scale"], given["max_seqlen_q"]
    packed = given["cu_seqlens_q"] is not None
    call = CacheArguments(
        q,
        k_cache,
        v_cache,
        q.new_empty(0, dtype=torch.int32),
        given["backend"],
        head_dim**-0.5 if scale is None else scale,
        left,
        right,
        given["softcap"] or 0.0,
        max_seqlen_q=0 if not packed else q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=given["max_seqlen_k"] or 0,
        **{name: given[name] for name in _AS_GIVEN},
    )
    for label in ("max_seqlen_q", "max_seqlen_k", "attention_chunk", "num_splits"):
        checks.size(NAME, label, getattr(call, label))
    k = given["k"]
    if packed and given["cu_seqlens_k_new"] is None and isinstance(k, Tensor) and k.dim() == 3:
        call = call._replace(cu_seqlens_k_new=call.cu_seqlens_q)  # as many new keys as queries
    _check_integers(call)
    _check_rows(call)
    _check_new(call)
    _check_rotary(call, given)
    for label in ("scale", "softcap", "alibi_slopes", "sink"):
        if given[label] is not None:
            check = CHECKS[label]
            check(NAME, label, given[label], call.as_attention())
    checks.softcap_of_scale(NAME, call.scale, call.softcap)
    return call._replace(cache_seqlens=_lengths(call, cache_seqlens))


_AS_GIVEN = (
    "k", "v", "block_table", "cu_seqlens_q", "cu_seqlens_k_new", "cache_batch_idx", "leftpad",
    "rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_seqlens", "alibi_slopes", "sink",
    "qv", "attention_chunk", "num_splits", "batch_invariant",
)  # fmt: skip


def _check_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, given: dict[str, Any]) -> None:
    """Kinds and shapes of q, qv and the caches."""
    packed = given["cu_seqlens_q"] is not None
    if packed:
        checks.tensors(NAME, cu_seqlens_q=given["cu_seqlens_q"])
    expected: tuple[tuple[str, Tensor, int, tuple[torch.dtype, ...], str], ...] = (
        ("q", q, 3 if packed else 4, tuple(DTYPES), "float16, bfloat16, float32 or float64"),
        ("k_cache", k_cache, 4, (q.dtype, FP8), f"{q.dtype} (q's) or {FP8}"),
        ("v_cache", v_cache, 4, (k_cache.dtype,), f"{k_cache.dtype} (k_cache's)"),
    )
    for label, tensor, rank, dtypes, wanted in expected:
        if tensor.dtype not in dtypes:
            raise TypeError(f"{NAME}: {label} has dtype {tensor.dtype}, expected {wanted}")
        if tensor.dim() != rank:
            raise ValueError(
                f"{NAME}: {label} has shape {list(tensor.shape)}, expected {rank} dimensions "
                f"{_PACKED if rank == 3 else _DENSE}"
            )
        checks.on_device(NAME, label, tensor, q.device)
    if torch.is_grad_enabled():
        for label, value in {"q": q, "k_cache": k_cache, "v_cache": v_cache, **given}.items():
            # A model's sink is a parameter: that does not say that this call wants a gradient.
            if label != "sink" and isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(
                    f"{NAME}: {label} requires a gradient, expected none, since a cache has none "
                    "(call it under torch.no_grad() or torch.inference_mode())"
                )
    heads, head_dim = q.shape[-2:]
    heads_kv = k_cache.shape[2]
    if k_cache.shape[3] != head_dim:
        raise ValueError(
            f"{NAME}: k_cache has shape {list(k_cache.shape)}, expected [*, *, {heads_kv}, "
            f"{head_dim}] (head_dim must match q)"
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"{NAME}: v_cache has shape {list(v_cache.shape)}, expected "
            f"{[*k_cache.shape[:3], '*']} (all but the head dim must match k_cache)"
        )
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(
            f"{NAME}: q has {heads} heads and k_cache has {heads_kv}, expected heads_kv to divide "
            "heads (query head h reads kv head h // (heads // heads_kv))"
        )
    for label, tensor in (("q", q), ("v_cache", v_cache)):
        if tensor.shape[-1] == 0:
            raise ValueError(
                f"{NAME}: {label} has shape {list(tensor.shape)}, expected a head dim >= 1"
            )
    if given["qv"] is not None:
        _check_like("qv", given["qv"], [*q.shape[:-1], v_cache.shape[-1]], q)


def _check_like(label: str, value: Any, shape: list[int], like: Tensor) -> None:
    """A tensor of this shape, and of another's dtype and device."""
    checks.tensors(NAME, **{label: value})
    if value.dtype != like.dtype:
        raise TypeError(f"{NAME}: {label} has dtype {value.dtype}, expected {like.dtype}")
    if list(value.shape) != shape:
        raise ValueError(f"{NAME}: {label} has shape {list(value.shape)}, expected {shape}")
    checks.on_device(NAME, label, value, like.device)


def _check_integers(call: CacheArguments) -> None:
    """The int32 tensors, but for cache_seqlens."""
    batch = call.batch
    for label in ("cache_batch_idx", "leftpad", "rotary_seqlens"):
        _check_int32(label, getattr(call, label), [batch], call.q.device)
    for label in ("cu_seqlens_q", "cu_seqlens_k_new"):
        _check_int32(label, getattr(call, label), [batch + 1], call.q.device)
    table = call.block_table
    if table is not None:
        _check_int32("block_table", table, None, call.q.device)
        if table.dim() != 2:
            raise ValueError(
                f"{NAME}: block_table has shape {list(table.shape)}, expected [batch, pages of a "
                "sequence]"
            )


def _check_int32(label: str, value: Any, shape: list[int] | None, device: torch.device) -> None:
    if value is None:
        return
    checks.tensors(NAME, **{label: value})
    if value.dtype != torch.int32:
        integers = not (value.is_floating_point() or value.is_complex())
        cast = f" (pass {label}.int())" if integers else ""
        raise TypeError(f"{NAME}: {label} has dtype {value.dtype}, expected torch.int32{cast}")
    if shape is not None and list(value.shape) != shape:
        raise ValueError(f"{NAME}: {label} has shape {list(value.shape)}, expected {shape}")
    checks.on_device(NAME, label, value, device)


def _check_rows(call: CacheArguments) -> None:
    """There is a row of the cache, or of the table, for each sequence."""
    label, rows = (
        ("k_cache", call.k_cache) if call.block_table is None else ("block_table", call.block_table)
    )
    if call.cache_batch_idx is None and rows.shape[0] < call.batch:
        raise ValueError(
            f"{NAME}: {label} has shape {list(rows.shape)}, expected at least {call.batch} rows "
            "(the batch of q)"
        )


def _check_new(call: CacheArguments) -> None:
    """k and v come together, and agree with the caches."""
    if call.k is None and call.v is None:
        if call.cu_seqlens_k_new is not None:
            raise ValueError(f"{NAME}: cu_seqlens_k_new is given, expected k and v with it")
        return
    for label, new in (("k", call.k), ("v", call.v)):
        if not isinstance(new, Tensor):
            raise TypeError(
                f"{NAME}: {label} is {checks.type_name(new)}, expected a torch.Tensor (k and v "
                "come together)"
            )
    assert call.k is not None
    packed = call.cu_seqlens_k_new is not None
    if call.k.dim() != (3 if packed else 4):
        layout = _PACKED if packed else _DENSE
        raise ValueError(f"{NAME}: k has shape {list(call.k.shape)}, expected {layout}")
    rows = [call.k.shape[0]] if packed else [call.batch, call.k.shape[1]]
    _check_like("k", call.k, [*rows, *call.k_cache.shape[2:]], call.q)
    _check_like("v", call.v, [*rows, *call.v_cache.shape[2:]], call.q)


def _check_rotary(call: CacheArguments, given: dict[str, Any]) -> None:
    """cos and sin come together, with k, and rotary_dim fits into a head."""
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None and sin is None:
        if call.rotary_seqlens is not None:
            raise ValueError(f"{NAME}: rotary_seqlens is given, expected rotary_cos with it")
        return
    checks.tensors(NAME, rotary_cos=cos, rotary_sin=sin)
    assert cos is not None
    assert sin is not None
    if call.k is None:
        raise ValueError(f"{NAME}: rotary_cos is given, expected k and v with it")
    for label, value in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not value.is_floating_point():
            raise TypeError(f"{NAME}: {label} has dtype {value.dtype}, expected a floating one")
        checks.on_device(NAME, label, value, call.q.device)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > call.q.shape[-1]:
        raise ValueError(
            f"{NAME}: rotary_cos and rotary_sin have shapes {list(cos.shape)} and "
            f"{list(sin.shape)}, expected [positions, rotary_dim / 2] for both, rotary_dim at most "
            f"{call.q.shape[-1]} (head_dim)"
        )


def _lengths(call: CacheArguments, value: Any) -> Tensor:
    """cache_seqlens as a tensor; None is all that there is room for."""
    if isinstance(value, Tensor):
        _check_int32("cache_seqlens", value, [call.batch], call.q.device)
        return value
    if value is None:
        if call.k is not None:
            raise ValueError(f"{NAME}: cache_seqlens is None, expected the lengths to append k at")
        value = call.room
    if isinstance(value, bool) or not isinstance(checks.plain(value), (int, torch.SymInt)):
        raise TypeError(
            f"{NAME}: cache_seqlens is {checks.type_name(value)}, expected an int32 torch.Tensor, "
            "an int or None"
        )
    number = checks.size(NAME, "cache_seqlens", value)
    return equal_lengths(call.batch, number, call.q.device)


def equal_lengths(batch: int, length: int, device: torch.device) -> Tensor:
    """`length` for each sequence, int32 `[batch]`."""
    return torch.full((batch,), length, dtype=torch.int32, device=device)
