"""FlashAttention-3 by its own names: `from cute_attention.flash_attn_interface import ...`.

`cute_attention.flash_attn.install()` puts it in the place of FlashAttention-3 for code that cannot
be edited. `docs/migrating.md` says what differs.
"""

from __future__ import annotations

from .integrations.flash_attn_interface.combine import flash_attn_combine, get_scheduler_metadata
from .integrations.flash_attn_interface.dense import flash_attn_func, flash_attn_qkvpacked_func
from .integrations.flash_attn_interface.kvcache import flash_attn_with_kvcache
from .integrations.flash_attn_interface.private import _flash_attn_backward, _flash_attn_forward
from .integrations.flash_attn_interface.varlen import flash_attn_varlen_func

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
