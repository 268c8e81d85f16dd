"""FlashAttention-3 from its shared library alone.

Some packages ship the library without the Python functions of FlashAttention-3, xformers for one
(`xformers/flash_attn_3/_C.so`). `load` registers the library's ops as torch.ops.flash_attn_3.
The functions here call them under the names and arguments that the package `flash_attn_interface`
has, so a contender calls either in the same way.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

# Names the library, or a folder with it and, where it wants another CUDA than PyTorch, its runtime.
VARIABLE = "CUTE_ATTENTION_FLASH_ATTN_3"


def library() -> Path | None:
    """The library that the environment names; None where it names none.

    Raises FileNotFoundError if it is not there, and ValueError if a folder has several.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named).resolve()
    if path.is_dir():
        found = sorted(path.glob("*.so"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{VARIABLE}={named} has several libraries ({names}): name one")
        path = found[0] if found else path / "*.so"
    if not path.is_file():
        raise FileNotFoundError(f"{VARIABLE}={named}: there is no {path.name}")
    return path


@functools.cache
def load(path: Path) -> None:
    """Registers the ops of the library."""
    for runtime in sorted(path.parent.glob("libcudart.so.*")):
        ctypes.CDLL(str(runtime))  # then the loader does not search for it
    torch_cuda = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if torch_cuda.exists():  # the library finds PyTorch's symbols only among the global ones
        ctypes.CDLL(str(torch_cuda), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)
    torch.ops.flash_attn_3.fwd  # noqa: B018  raises AttributeError where it is another library


class _Attention(torch.autograd.Function):
    """The ops as a differentiable function. `packing` is empty for dense tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packing: dict[str, Any],
        options: dict[str, Any],
        num_splits: int,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            q, k, v, **packing, **options, num_splits=num_splits
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.options, ctx.deterministic = packing, options, deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            **ctx.packing,
            **ctx.options,
            deterministic=ctx.deterministic,
        )
        return dq, dk, dv, None, None, None, None


def _call(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    packing: dict[str, Any],
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    options = {
        "softmax_scale": tensors[0].shape[-1] ** -0.5,
        "is_causal": causal,
        "window_size_left": window_size[0],
        "window_size_right": window_size[1],
        "softcap": softcap,
    }
    out, lse = _Attention.apply(*tensors, packing, options, num_splits, deterministic)
    return (out, lse) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention on `[batch, seqlen, heads, head_dim]`: out, or (out, lse) if asked for.

    -1 in a window is unbounded; num_splits = 0 lets the library divide the keys among CTAs.
    """
    rest = causal, window_size, softcap, num_splits, deterministic, return_attn_probs
    return _call((q, k, v), {}, *rest)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` on packed sequences, `[total, heads, head_dim]`."""
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    rest = causal, window_size, softcap, num_splits, deterministic, return_attn_probs
    return _call((q, k, v), packing, *rest)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    causal: bool = False,
    num_splits: int = 0,
) -> torch.Tensor:
    """Attention of `q [batch, seqlen_q, heads, head_dim]` to the first `cache_seqlens` keys of each
    sequence of a cache, `[batch, room, heads_kv, head_dim]` or of pages."""
    out, *_ = torch.ops.flash_attn_3.fwd(
        q,
        k_cache,
        v_cache,
        seqused_k=cache_seqlens,
        page_table=page_table,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=causal,
        num_splits=num_splits,
    )
    return out
