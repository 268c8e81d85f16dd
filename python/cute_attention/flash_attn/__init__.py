"""flash-attn 2 by its own names: `from cute_attention.flash_attn import flash_attn_func`.

`install()` puts it in the place of flash-attn for code that cannot be edited. `docs/migrating.md`
says what differs.
"""

from __future__ import annotations

from ..integrations.flash_attn.dense import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from ..integrations.flash_attn.kvcache import flash_attn_with_kvcache
from ..integrations.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from . import bert_padding, flash_attn_interface
from .installation import install
from .version import VERSION as __version__

__all__ = [
    "__version__",
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
