"""Kernel rows from Python: choose a configuration, prove its layouts, compile it, run it.

    row = Row("sm80", "forward", "bf16", head_dim=128, tile_n=32)
    row.check()                                  # the layout lab's proofs: no GPU
    kernel = row.build()                         # nvcc, about a minute; the next time from a cache
    out = attention(q, k, v, kernel=kernel)      # or: with use(kernel): ...
    kernel = autotune(q, k, v, causal=True)      # the fastest for this call, remembered

docs/rows.md tells more.
"""

from __future__ import annotations

from ..dispatch.jit import jit
from ..dispatch.request import use
from ..errors import BuildError, RowError
from ..native.core import Kernel
from .autotune import autotune
from .libraries import load_library
from .row import Row

__all__ = [
    "BuildError",
    "Kernel",
    "Row",
    "RowError",
    "autotune",
    "jit",
    "load_library",
    "use",
]
