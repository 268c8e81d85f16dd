"""Ours in blocks that somebody else chooses: kernels and rows by name, and blocks of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cute_attention
from cute_attention.inference import merge_attention
from cute_attention.native.core import Kernel
from cute_attention.rows import Row

from .. import kernel_folder
from ..inputs import Inputs
from ..points import Point
from .base import Attention, CannotRun, needs_gpu
from .ours import Ours


class BuiltKernel(Ours):
    """A loaded kernel, which calls ask for by name."""

    needs = "a GPU of its family"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = self.title = kernel.name

    def _options(self, point: Point, **extra: Any) -> dict[str, Any]:
        return {**super()._options(point, **extra), "backend": "auto", "kernel": self.kernel}

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device)


class BuiltRow(Ours):
    """A forward row, from a folder of kernels or built where it is measured; its name is its
    tile."""

    needs = "a GPU of its family, and its kernel or nvcc"

    def __init__(self, row: Row, kernels: Path | None = None) -> None:
        self.row, self.kernels = row, kernels
        self.name = self.title = f"{row.columns.tile_m} x {row.columns.tile_n}"

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device)

    def refuses(self, point: Point, direction: str) -> str | None:
        return None if direction == "fwd" else "it is a forward kernel"

    def build(self, point: Point, inputs: Inputs) -> Attention:
        kernel = kernel_folder.load(self.row, self.kernels) if self.kernels else self.row.build()
        return BuiltKernel(kernel).build(point, inputs)


class KeyBlocks(Ours):
    """The reference backend on blocks of so many keys, whose outputs are merged by their LSE: the
    online softmax of a kernel, with its block size as an argument. It needs no GPU."""

    needs = "nothing"

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.name = self.title = f"{keys} keys"

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.varlen or point.mask != "full" or point.features:
            return "blocks of keys are measured without masks, packing and features"
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        if reason := self.refuses(point, "fwd"):
            raise CannotRun(reason)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = [
                cute_attention.attention(q, keys, values, return_lse=True, backend="reference")
                for keys, values in zip(
                    k.split(self.keys, dim=1), v.split(self.keys, dim=1), strict=True
                )
            ]
            outs, lses = zip(*parts, strict=True)
            return merge_attention(outs, lses)[0]

        return call
