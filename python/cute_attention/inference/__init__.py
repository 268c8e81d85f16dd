"""Inference: attention to a KV cache, plain or of pages, and results of parts of the keys merged.

api         attention_with_cache
options     its keyword arguments; checked: from these to CacheArguments
choice      which backend serves a call, and explain_with_cache
lowered     the ops of kernels, made of those of `attention`
paged_cache PagedCache
merge       merge_attention
"""

from __future__ import annotations

from . import lowered as lowered  # implements the ops of kernels for CUDA
from .api import attention_with_cache
from .choice import explain_with_cache
from .merge import merge_attention
from .paged_cache import PagedCache

__all__ = ["PagedCache", "attention_with_cache", "explain_with_cache", "merge_attention"]
