"""This package's backends, by name."""

from __future__ import annotations

from typing import Any

import torch

import cute_attention

from ..inputs import Inputs
from ..points import Point
from .base import OURS, Attention, AttentionWithLse, Contender, needs_gpu, reason_for


class Ours(Contender):
    """`attention(..., backend=name)` and `attention_varlen`."""

    role = OURS

    def build(self, point: Point, inputs: Inputs) -> Attention:
        call: Attention = self._build(point, inputs, want_lse=False)
        return call

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        call: AttentionWithLse = self._build(point, inputs, want_lse=True)
        return call

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        options: dict[str, Any] = {
            "causal": point.causal,
            "window": tuple(point.window) if point.window else None,
            "softcap": point.softcap or None,
            "return_lse": want_lse,
            "backend": self.name,
        }
        if point.deterministic:
            options["deterministic"] = True
        cu_seqlens, longest = inputs.cu_seqlens, inputs.max_seqlen
        if cu_seqlens is None:
            return lambda q, k, v: cute_attention.attention(q, k, v, **options)
        return lambda q, k, v: cute_attention.attention_varlen(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options
        )


class Reference(Ours):
    name = "reference"
    title = "ours, reference"
    needs = "nothing"


class KernelBackend(Ours):
    """A backend of compiled kernels: it needs a GPU and rows."""

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device) or self._no_rows("forward")

    def refuses(self, point: Point, direction: str) -> str | None:
        if direction == "fwd":
            return None
        missing = self._no_rows("backward")
        return missing and f"{missing}: its gradient is the reference backend's"

    def _no_rows(self, direction: str) -> str | None:
        try:
            rows = cute_attention.kernels()
        except (
            Exception
        ) as error:  # a kernel library that cannot be loaded is a reason like any other
            return f"the kernel libraries cannot be read: {reason_for(error)}"
        prefix = f"{self.name}_{direction[:3]}_"
        if any(row.name.startswith(prefix) for row in rows):
            return None
        return f"no {self.name} {direction} kernel is loaded"


class Sm90(KernelBackend):
    name = "sm90"
    title = "ours, sm90"
    needs = "a Hopper GPU and libcute_attention_sm90a.so"


class Sm80(KernelBackend):
    name = "sm80"
    title = "ours, sm80"
    needs = "an Ampere or newer GPU and libcute_attention_sm80.so"
