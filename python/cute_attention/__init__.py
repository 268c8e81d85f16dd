"""Exact attention, forward and backward, for PyTorch on NVIDIA GPUs."""

from __future__ import annotations

from . import flops as flops
from .backend import use_backend
from .errors import BackendError, FallbackWarning
from .explain import Explanation, explain, kernels
from .functional import attention, attention_varlen
from .reference import attention_reference, attention_varlen_reference

__all__ = [
    "BackendError",
    "Explanation",
    "FallbackWarning",
    "attention",
    "attention_reference",
    "attention_varlen",
    "attention_varlen_reference",
    "explain",
    "kernels",
    "use_backend",
]
