"""flash_attn.layers.rotary: of its names `apply_rotary_emb` alone."""

from __future__ import annotations

from ...integrations.flash_attn.rotary import apply_rotary_emb

__all__ = ["apply_rotary_emb"]
