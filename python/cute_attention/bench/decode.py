"""`decode`: one query per sequence against a cache of keys, by the bytes of K and V that are read.

Decoding reads each key and each value once and computes little, so the memory's rate bounds it. The
grid has head layouts and batches: many short sequences, few long ones, one very long one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import cute_attention.inference as inference

from .contenders import CONTENDERS, Contender, named
from .contenders.base import Attention, needs_gpu
from .contenders.ours import Ours
from .contenders.packages import FlashAttn3, PackageContender
from .inputs import TORCH_DTYPES, Inputs
from .points import Point
from .speed import Bench, Case, Prepared, Settings

LAYOUTS = ("32/8x128", "64/8x128", "8/1x128", "32/8x64", "16/4x256")
BATCHES = ("1x4096", "1x32768", "1x131072", "8x8192", "32x4096", "128x2048", "64x16384")
CPU_LAYOUTS = ("8/2x64", "4/1x32")
CPU_BATCHES = ("1x4096", "8x512")


def point_of(layout: str, batch: str, dtype: str) -> Point:
    """The point of `heads/heads_kv x head_dim` and `batch x keys`, as `32/8x128` and `8x8192`."""
    heads = re.fullmatch(r"(\d+)/(\d+)x(\d+)", layout)
    sizes = re.fullmatch(r"(\d+)x(\d+)", batch)
    if heads is None:
        raise ValueError(f"--layouts has {layout!r}, expected HEADS/HEADS_KVxHEAD_DIM")
    if sizes is None:
        raise ValueError(f"--batches has {batch!r}, expected BATCHxKEYS")
    return Point(
        batch=int(sizes[1]),
        heads=int(heads[1]),
        heads_kv=int(heads[2]),
        head_dim=int(heads[3]),
        seqlen_q=1,
        seqlen_k=int(sizes[2]),
        dtype=dtype,
        label=layout,
    )


def grid(layouts: Sequence[str], batches: Sequence[str], dtype: str) -> list[Point]:
    """Every batch with every layout."""
    return [point_of(layout, batch, dtype) for layout in layouts for batch in batches]


def bytes_read(point: Point) -> int:
    """Bytes of K and V together."""
    width = point.head_dim + point.head_dim_v
    return (
        point.batch * point.seqlen_k * point.heads_kv * width * TORCH_DTYPES[point.dtype].itemsize
    )


@dataclass(frozen=True)
class Cache:
    """Keys and values of a point as a cache, contiguous or of pages in a random order."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor  # int32 [batch]
    table: torch.Tensor | None


def cache_of(inputs: Inputs, page_size: int) -> Cache:
    """The inputs as they are; with a page size a copy of them in pages, up to whole pages."""
    _, k, v = inputs.detached
    batch, keys = k.shape[:2]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
    if not page_size:
        return Cache(k, v, lengths, None)
    count = -(-keys // page_size)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * count, generator=generator).to(k.device)
    room = count * page_size - keys
    pages = []
    for tensor in (k, v):
        filled = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, room))
        split = filled.reshape(batch * count, page_size, *tensor.shape[2:])
        pages.append(torch.empty_like(split).index_copy_(0, order, split))
    return Cache(pages[0], pages[1], lengths, order.view(batch, count).int())


class Cached(Ours):
    """`attention_with_cache` of one backend."""

    def __init__(self, contender: Ours, page_size: int) -> None:
        self.name, self.title = contender.name, contender.title
        self._contender, self._page_size = contender, page_size

    def missing(self, device: torch.device) -> str | None:
        return self._contender.missing(device)

    def build(self, point: Point, inputs: Inputs) -> Attention:
        cache = cache_of(inputs, self._page_size)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return inference.attention_with_cache(
                q, cache.k, cache.v, cache.lengths, block_table=cache.table, causal=True,
                max_seqlen_k=point.seqlen_k, backend=self.name,
            )  # fmt: skip

        return call


class CachedFlashAttn3(FlashAttn3):
    """flash_attn_with_kvcache of FlashAttention-3, which chooses the number of splits itself."""

    attribute = "flash_attn_with_kvcache"

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def build(self, point: Point, inputs: Inputs) -> Attention:
        cache = cache_of(inputs, self._page_size)
        function = self._package().flash_attn_with_kvcache

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = function(
                q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table,
                causal=True, num_splits=0,
            )  # fmt: skip
            return out

        return call


class FlashInfer(PackageContender):
    """BatchDecodeWithPagedKVCacheWrapper of FlashInfer. Its plan, which engines make once for all
    layers of a step, is outside of the clock."""

    name = "flashinfer"
    title = "FlashInfer"
    needs = "pip install flashinfer-python (module flashinfer)"
    module = "flashinfer"
    attribute = "BatchDecodeWithPagedKVCacheWrapper"
    workspace: ClassVar[int] = 256 * 2**20  # bytes

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size or 16  # it has pages only

    def missing(self, device: torch.device) -> str | None:
        return needs_gpu(device) or super().missing(device)

    def build(self, point: Point, inputs: Inputs) -> Attention:
        cache = cache_of(inputs, self._page_size)
        assert cache.table is not None
        device, count = cache.k.device, cache.table.shape[1]
        space = torch.empty(self.workspace, dtype=torch.uint8, device=device)
        group = point.heads // point.heads_kv
        wrapper: Any = getattr(self._package(), self.attribute)(
            space, "NHD", use_tensor_cores=group >= 4
        )
        ends = torch.arange(point.batch + 1, dtype=torch.int32, device=device) * count
        last = (cache.lengths - 1) % self._page_size + 1
        dtype = TORCH_DTYPES[point.dtype]
        wrapper.plan(
            ends, cache.table.flatten(), last, point.heads, point.heads_kv, point.head_dim,
            self._page_size, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q[:, 0], (cache.k, cache.v))
            return out[:, None]

        return call


def select(names: str | None, page_size: int, device: torch.device) -> list[Contender]:
    """The contenders of these names: ours by backend, fa3, flashinfer, and of PyTorch's own, which
    know no cache, those of `speed`."""
    chosen = names.split(",") if names else _DEFAULT[device.type]
    own: dict[str, Contender] = {
        name: Cached(contender, page_size)
        for name, contender in CONTENDERS.items()
        if isinstance(contender, Ours)
    }
    known = {
        **own,
        "fa3": CachedFlashAttn3(page_size),
        "flashinfer": FlashInfer(page_size),
        **{name: CONTENDERS[name] for name in ("cudnn", "flash", "math")},
    }
    return named(chosen, known, "no contender of decode is named")


_DEFAULT = {
    "cuda": ["auto", "fa3", "flashinfer", "cudnn", "flash"],
    "cpu": ["reference", "fa3", "flashinfer", "flash"],
}


class Decode(Bench):
    """The measurement of `speed` with the bytes of K and V for each second."""

    def __init__(self, settings: Settings, page_size: int) -> None:
        super().__init__(settings)
        self._page_size = page_size

    def _metrics(self, point: Point, direction: str, entry: Prepared) -> dict[str, float]:
        metrics = super()._metrics(point, direction, entry)
        return metrics | {"tbytes_s": bytes_read(point) / metrics["time_ms"] / 1e9}

    def _command(self, case: Case, direction: str) -> str:
        point = case.point
        words = ["python", "-m", "cute_attention", "bench", "decode"]
        words += ["--layouts", point.label, "--batches", f"{point.batch}x{point.seqlen_k}"]
        words += ["--dtype", point.dtype, "--contenders", case.contender.name]
        if self._page_size:
            words += ["--page-size", str(self._page_size)]
        if self.settings.device.type == "cpu":
            words += ["--device", "cpu"]
        return shlex.join(words)
