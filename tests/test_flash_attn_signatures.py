"""Parameters of flash-attn's functions: names, order and defaults, which are the contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cute_attention import flash_attn, flash_attn_interface
from cute_attention.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cute_attention.flash_attn import flash_attn_interface as interface

REQUIRED = inspect.Parameter.empty
PACKED = {"cu_seqlens_q": REQUIRED, "cu_seqlens_k": REQUIRED} | {
    "max_seqlen_q": REQUIRED, "max_seqlen_k": REQUIRED,
}  # fmt: skip
COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
QKV = dict.fromkeys(("q", "k", "v"), REQUIRED)
OF_KERNEL = dict.fromkeys(
    ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap",
     "alibi_slopes"), REQUIRED,
)  # fmt: skip
OF_GRADIENT = dict.fromkeys(
    ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"), REQUIRED
)
DESCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
HINTS_3 = {
    "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1,
    "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False,
}  # fmt: skip
SIGNATURES: list[tuple[Any, dict[str, Any]]] = [
    (flash_attn_func, QKV | COMMON),
    (flash_attn_kvpacked_func, {"q": REQUIRED, "kv": REQUIRED} | COMMON),
    (flash_attn_qkvpacked_func, {"qkv": REQUIRED} | COMMON),
    (flash_attn_varlen_func, QKV | PACKED | COMMON | {"block_table": None}),
    (flash_attn_varlen_kvpacked_func, {"q": REQUIRED, "kv": REQUIRED} | PACKED | COMMON),
    (flash_attn_varlen_qkvpacked_func,
     dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), REQUIRED) | COMMON),
    (flash_attn.flash_attn_with_kvcache,
     dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED) | {
         "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
         "cache_batch_idx": None, "cache_leftpad": None, "block_table": None,
         "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
         "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
         "return_softmax_lse": False,
     }),
    (interface._flash_attn_forward, QKV | OF_KERNEL | {"return_softmax": REQUIRED}),
    (interface._flash_attn_varlen_forward,
     QKV | PACKED | OF_KERNEL | {
         "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
         "return_softmax": False, "block_table": None, "leftpad_k": None, "seqused_k": None,
         "zero_tensors": False, "num_splits": 0,
     }),
    (interface._flash_attn_backward,
     OF_GRADIENT | OF_KERNEL | {"deterministic": REQUIRED, "rng_state": None}),
    (interface._flash_attn_varlen_backward,
     OF_GRADIENT | PACKED | OF_KERNEL | {
         "deterministic": REQUIRED, "rng_state": None, "zero_tensors": False,
     }),
    (interface._get_block_size_n,
     dict.fromkeys(("device", "head_dim", "is_dropout", "is_causal"), REQUIRED)),
    (flash_attn_interface.flash_attn_func,
     QKV | {"softmax_scale": None, "causal": False, "qv": None} | DESCALES | HINTS_3),
    (flash_attn_interface.flash_attn_varlen_func,
     QKV | PACKED | {"seqused_q": None, "seqused_k": None, "softmax_scale": None}
     | {"causal": False, "qv": None} | DESCALES | HINTS_3),
    (flash_attn_interface.flash_attn_with_kvcache,
     dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED) | dict.fromkeys((
         "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
         "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q",
         "rotary_seqlens", "q_descale", "k_descale", "v_descale", "softmax_scale")) | {
         "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0,
         "rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0,
         "pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False,
     }),
    (flash_attn_interface.flash_attn_combine,
     {"out_partial": REQUIRED, "lse_partial": REQUIRED, "out": None, "out_dtype": None}),
    (flash_attn_interface.get_scheduler_metadata,
     dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv",
                    "headdim", "cache_seqlens"), REQUIRED) | {
         "qkv_dtype": torch.bfloat16, "headdim_v": None, "cu_seqlens_q": None,
         "cu_seqlens_k_new": None, "cache_leftpad": None, "page_size": None,
         "max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1), "attention_chunk": 0,
         "has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0,
     }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "parameters"),
    SIGNATURES,
    ids=[f"{f.__module__.split('.')[-2]}.{f.__name__}" for f, _ in SIGNATURES],
)
def test_signatures(function: Any, parameters: dict[str, Any]) -> None:
    found = inspect.signature(function).parameters
    assert [(name, p.default) for name, p in found.items()] == list(parameters.items())
    # Libraries for ring attention read them so, which does not look behind decorators.
    assert inspect.getfullargspec(function).args == list(parameters)


def test_documented_arguments_are_those_of_the_signature() -> None:
    for function, parameters in SIGNATURES:
        if "Args:" not in (function.__doc__ or ""):
            continue
        section = inspect.cleandoc(function.__doc__).split("Args:\n")[1].split("\n\n")[0]
        lines = [line for line in section.splitlines() if line[:4] == "    " != line[4:8]]
        names = [line.split(":")[0].strip() for line in lines]
        assert names == list(parameters), function
