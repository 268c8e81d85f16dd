"""`torch.ops.flash_attn_3`: the operators of FlashAttention-3, for code that calls these.

Their names, arguments and defaults are upstream's. They have no gradient of their own, as there.
What upstream returns of its workspaces are empty tensors here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .combine import flash_attn_combine, get_scheduler_metadata
from .private import _flash_attn_backward, _flash_attn_forward

NAMESPACE = "flash_attn_3"

_FORWARD = """
    Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
    Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
    Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,
    Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,
    Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
    Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None,
    bool is_causal=False, int window_size_left=-1, int window_size_right=-1,
    int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False,
    Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0
"""
_BACKWARD = """
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
    Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None,
    bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.,
    bool deterministic=False, int sm_margin=0
"""
_COMBINE = """
    Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None
"""
_SCHEDULE = """
    int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
    int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None,
    Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,
    Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False,
    int window_size_left=-1, int window_size_right=-1, int attention_chunk=0,
    bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0
"""
# What an argument of `fwd` or `bwd` is called by our functions of their parameters.
_RENAMED = {
    "q_v": "qv",
    "out": "out_",
    "is_causal": "causal",
    "is_rotary_interleaved": "rotary_interleaved",
}


def _fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # PyTorch leaves out what has its default, and this one is not that of our function.
    given = _named(_FORWARD, args, kwargs)
    given.setdefault("is_rotary_interleaved", False)
    return _flash_attn_forward(**{_RENAMED.get(name, name): x for name, x in given.items()})


def _bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    given = _named(_BACKWARD, args, kwargs)
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        if given.get(name) is None:
            given[name] = torch.empty_like(given[like])
    given["sequed_q"], given["sequed_k"] = (
        given.pop("seqused_q", None),
        given.pop("seqused_k", None),
    )
    sums = _flash_attn_backward(**given)
    nothing = (sums.new_empty(0) for _ in range(4))
    return given["dq"], given["dk"], given["dv"], sums, *nothing


def _get_scheduler_metadata(*args: Any, **kwargs: Any) -> Tensor:
    seqused_k = _named(_SCHEDULE, args, kwargs)["seqused_k"]
    return get_scheduler_metadata(0, 0, 0, 0, 0, 0, seqused_k)  # all the others are hints


def _named(arguments: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by their names."""
    names = [argument.split()[-1].partition("=")[0] for argument in arguments.split(",")]
    return dict(zip(names, args, strict=False)) | kwargs


# Operator: its arguments, its results, what runs.
_OPERATORS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "fwd": (_FORWARD, "(Tensor(out!), Tensor, Tensor, Tensor)", _fwd),
    "bwd": (
        _BACKWARD,
        "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
        _bwd,
    ),
    "fwd_combine": (_COMBINE, "(Tensor(out!), Tensor)", flash_attn_combine),
    "get_scheduler_metadata": (_SCHEDULE, "Tensor", _get_scheduler_metadata),
}
_library: list[torch.library.Library] = []  # the operators exist as long as it does


def register() -> None:
    """Defines the operators, once.

    Raises:
        RuntimeError: others of these names are there.
    """
    if _library:
        return
    if hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        raise RuntimeError(
            f"install: torch.ops.{NAMESPACE}.fwd is registered already, expected install() before "
            "anything imports FlashAttention-3"
        )
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, (arguments, results, run) in _OPERATORS.items():
        library.define(f"{name}({' '.join(arguments.split())}) -> {results}")
        library.impl(name, run, "CompositeExplicitAutograd")
    _library.append(library)
