"""Exact attention, forward and backward, for PyTorch on NVIDIA GPUs."""

from __future__ import annotations

from . import inference as inference  # defines its ops
from .api import attention, attention_varlen
from .dispatch.explain import Explanation, explain, kernels
from .dispatch.record import explain_calls
from .dispatch.request import use_backend
from .errors import BackendError, FallbackWarning
from .ops import flops as flops  # registers the formulas
from .semantics.formula import attention_reference, attention_varlen_reference


def __getattr__(name: str) -> str:
    """`__version__`, of the installed package; "unknown" where it is imported from its sources."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("cute-attention")
    except metadata.PackageNotFoundError:
        return "unknown"


__all__ = [
    "BackendError",
    "Explanation",
    "FallbackWarning",
    "attention",
    "attention_reference",
    "attention_varlen",
    "attention_varlen_reference",
    "explain",
    "explain_calls",
    "kernels",
    "use_backend",
]
