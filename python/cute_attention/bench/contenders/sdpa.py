"""PyTorch's scaled_dot_product_attention, one backend pinned at a time."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ..inputs import Inputs
from ..points import Bounds, Point
from ..visible import visible
from .base import (
    BASELINE,
    PEER,
    Attention,
    AttentionWithLse,
    CannotRun,
    Contender,
    needs_gpu,
)


class Sdpa(Contender):
    """scaled_dot_product_attention over transposed views of [batch, seqlen, heads, head_dim]. A
    model whose projections write that layout calls it like this."""

    backend: SDPBackend
    function = "scaled_dot_product_attention"
    features = frozenset({"bias", "dropout"})
    dense_mask = True  # takes a window as a dense boolean mask

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return sdpa_kernel(self.backend)

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.varlen:
            return f"PyTorch has no packed call that pins {self.backend.name}"
        if not self.dense_mask and point.mask not in ("full", "causal"):
            return f"{self.backend.name} takes no window"
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        call = self._heads_first(point, inputs)
        return lambda q, k, v: call(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)

    def native(self, point: Point, inputs: Inputs) -> tuple[Attention, Inputs]:
        if point.varlen:
            return super().native(point, inputs)
        return self._heads_first(point, inputs), _turned(inputs)

    def _heads_first(self, point: Point, inputs: Inputs) -> Attention:
        """The call on [batch, heads, seqlen, dim]."""
        gqa = point.heads != point.heads_kv
        options: dict[str, Any] = {"enable_gqa": gqa, "dropout_p": point.dropout}
        if inputs.bias is not None:  # it has the mask
            learned, constant = inputs.bias, inputs.bias.detach()
            return lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=learned if q.requires_grad else constant, **options
            )
        square = point.seqlen_q == point.seqlen_k
        # PyTorch aligns is_causal to the top left, ours to the bottom right: the same in a square.
        causal = point.mask == "causal" and square
        mask: Any = None
        if point.mask == "causal" and not square:
            if self.dense_mask:
                mask = visible(point.seqlen_q, point.seqlen_k, point.bounds, inputs.q.device)
            else:
                mask = causal_lower_right(point.seqlen_q, point.seqlen_k)
        elif point.mask not in ("full", "causal"):
            mask = visible(point.seqlen_q, point.seqlen_k, point.bounds, inputs.q.device)
        options |= {"attn_mask": mask, "is_causal": causal}
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


class Cudnn(Sdpa):
    name = "cudnn"
    title = "cuDNN (SDPA)"
    needs = "an NVIDIA GPU, fp16 or bf16"
    half_on = frozenset({"cuda"})
    backend = SDPBackend.CUDNN_ATTENTION

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device)


class Efficient(Sdpa):
    name = "efficient"
    title = "EFFICIENT (SDPA)"
    needs = "an NVIDIA GPU"
    backend = SDPBackend.EFFICIENT_ATTENTION

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device)


class Math(Sdpa):
    """It computes fp16 and bf16 in fp32, so it is no peer: it serves as a baseline."""

    name = "math"
    title = "MATH (SDPA)"
    role = BASELINE
    needs = "nothing; memory grows with the square of the sequence"
    backend = SDPBackend.MATH

    def refuses(self, point: Point, direction: str) -> str | None:
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        if not point.varlen:
            return super().build(point, inputs)
        gqa = point.heads != point.heads_kv
        lengths = list(point.lengths)
        causal = point.mask == "causal"
        masks = {}
        if point.mask not in ("full", "causal"):
            masks = {n: visible(n, n, point.bounds, inputs.q.device) for n in sorted(set(lengths))}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = [x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)]
            documents = zip(lengths, parts[0], parts[1], parts[2], strict=True)
            outs = [
                F.scaled_dot_product_attention(
                    q1,
                    k1,
                    v1,
                    attn_mask=masks.get(n),
                    dropout_p=point.dropout,
                    is_causal=causal,
                    enable_gqa=gqa,
                )
                for n, q1, k1, v1 in documents
            ]
            return torch.cat(outs, 2)[0].transpose(0, 1)

        return call


class Flash(Sdpa):
    """FlashAttention-2 as built into PyTorch; on a CPU, PyTorch's own blockwise kernel."""

    name = "flash"
    title = "FLASH (SDPA)"
    role = PEER
    needs = "fp16 or bf16 on an NVIDIA GPU; any dtype on a CPU"
    half_on = frozenset({"cuda"})
    backend = SDPBackend.FLASH_ATTENTION
    function = "the FLASH backend of scaled_dot_product_attention"
    features = frozenset({"dropout"})
    dense_mask = False

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.varlen:
            return "varlen_attn has no dropout" if point.dropout else None
        return super().refuses(point, direction)

    def build(self, point: Point, inputs: Inputs) -> Attention:
        if not point.varlen:
            return super().build(point, inputs)
        if inputs.q.device.type != "cuda":
            raise CannotRun("PyTorch's packed attention needs an NVIDIA GPU")
        return _varlen_attn(point, inputs)

    def native_with_lse(self, point: Point, inputs: Inputs) -> tuple[AttentionWithLse, Inputs]:
        """The op that scaled_dot_product_attention calls, which returns the LSE too."""
        plain = point.mask == "full" or (point.causal and point.seqlen_q == point.seqlen_k)
        if point.varlen or not plain or point.heads != point.heads_kv:
            raise CannotRun("PyTorch's op with an LSE takes dense, square, ungrouped calls alone")
        if inputs.q.device.type != "cuda":
            raise CannotRun("PyTorch's op with an LSE needs an NVIDIA GPU")
        op = torch.ops.aten._scaled_dot_product_flash_attention
        causal = point.mask == "causal"

        def call(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse, *_ = op(q, k, v, point.dropout, causal)
            return out, lse

        return call, _turned(inputs)


def _turned(inputs: Inputs) -> Inputs:
    """The inputs as [batch, heads, seqlen, dim]: views."""
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs.detached)
    return replace(inputs, q=q, k=k, v=v, grad_out=inputs.grad_out.transpose(1, 2))


def _varlen_attn(point: Point, inputs: Inputs) -> Attention:
    """torch.nn.attention.varlen, whose mask arguments changed between releases."""
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if "window_size" in parameters:
        options["window_size"] = tuple(-1 if x is None else x for x in point.bounds)
    elif point.bounds == Bounds(None, 0):
        options["is_causal"] = True
    elif point.mask != "full":
        raise CannotRun("varlen_attn of this PyTorch takes no window")
    if point.heads != point.heads_kv:
        if "enable_gqa" not in parameters:
            raise CannotRun("varlen_attn of this PyTorch takes no grouped heads")
        options["enable_gqa"] = True
    cu_seqlens, longest = inputs.cu_seqlens, inputs.max_seqlen

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
        return out

    return call
