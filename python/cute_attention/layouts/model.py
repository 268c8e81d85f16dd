"""Exported layouts as tables of numbers: which thread moves or holds which element, and where.

Element (r, c) of an R x C tile is number r + R c. Tables of a copy are [thread, instruction,
value], those of a fragment [thread, register]. Addresses are in elements from a buffer's start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pycute
from numpy.typing import NDArray

from cute_attention.layouts.export import Request, export
from cute_attention.native.rows import TableRow

Array = NDArray[np.int64]
ELEMENT_BYTES = 2


def _nested(value: Any) -> Any:
    return tuple(map(_nested, value)) if isinstance(value, list) else value


def layout_of(exported: dict[str, Any]) -> pycute.Layout:
    """The pycute layout of an exported one."""
    return pycute.Layout(_nested(exported["shape"]), _nested(exported["stride"]))


def mode_offsets(shape: Any, stride: Any) -> Array:
    """The offsets of all elements of a mode; the first of nested modes varies fastest."""
    sizes, steps = pycute.flatten(shape), pycute.flatten(stride)
    offsets = np.zeros(1, np.int64)
    for size, step in zip(sizes, steps, strict=True):
        offsets = (np.arange(size)[:, None] * step + offsets[None, :]).reshape(-1)
    return offsets


def table(exported: dict[str, Any]) -> Array:
    """The offsets of a layout as an array with one axis for each top-level mode."""
    layout = layout_of(exported)
    modes = [mode_offsets(s, d) for s, d in zip(layout.shape, layout.stride, strict=True)]
    return functools.reduce(np.add.outer, modes)


def swizzled(offsets: Array, swizzle: Iterable[int]) -> Array:
    """The addresses to which a swizzle moves the given ones."""
    bits, base, shift = swizzle
    return offsets ^ ((offsets >> shift) & (((1 << bits) - 1) << base))


@dataclass(frozen=True)
class SharedTile:
    """A tile (rows, cols) of a tensor in its buffer, or the transpose of one."""

    tensor: str
    transposed: bool
    swizzle: tuple[int, int, int]
    layout: dict[str, Any]

    @functools.cached_property
    def address(self) -> Array:
        """[row, col]"""
        return swizzled(table(self.layout), self.swizzle)

    def of_element(self, elements: Array) -> Array:
        """The addresses of elements. An element outside the tile gets some address outside it."""
        inside = (elements >= 0) & (elements < self.address.size)
        address = self.address.reshape(-1, order="F")[np.where(inside, elements, 0)]
        return np.where(inside, address, self.address.size + np.abs(elements))

    @property
    def notation(self) -> str:
        """The layout as CuTe prints it."""
        bits, base, shift = self.swizzle
        layout = str(layout_of(self.layout)).replace(" ", "")
        return f"Sw<{bits},{base},{shift}> o {layout}" if bits else layout


def shared_tile(exported: dict[str, Any]) -> SharedTile:
    """A tile as exported."""
    return SharedTile(
        exported["tensor"],
        exported["transposed"],
        tuple(exported["swizzle"]),
        exported["layout"],
    )


def by_instruction(exported: dict[str, Any], values: int) -> Array:
    """A tiled copy's (THREAD, VALUES, REST) as [thread, instruction, value of the instruction]."""
    offsets = table(exported)
    threads, total, rest = offsets.shape
    split = offsets.reshape(threads, total // values, values, rest)
    return split.transpose(0, 3, 1, 2).reshape(threads, -1, values)


def registers_by_instruction(exported: dict[str, Any], values: int) -> Array:
    """A retiled fragment (VALUES, REST, ...) as [instruction, value of the instruction]."""
    offsets = table(exported)
    flat = offsets.reshape(offsets.shape[0], -1, order="F")
    split = flat.reshape(flat.shape[0] // values, values, flat.shape[1])
    return split.transpose(2, 0, 1).reshape(-1, values)


def mma_elements(exported: dict[str, Any], operand: str) -> Array:
    """Elements of a tiled MMA's operand, [thread, value, rest 0, rest 1], from its partition."""
    thread_layout = layout_of(exported["threads"])  # (V, M, N, K) -> thread
    sizes = [pycute.size(mode) for mode in thread_layout.shape]
    threads = table(exported["threads"]).reshape(-1, order="F")
    v, m, n, k = np.unravel_index(np.arange(threads.size), sizes, order="F")
    first, second, size = {
        "a": (m, k, sizes[1]),
        "b": (n, k, sizes[2]),
        "c": (m, n, sizes[1]),
    }[operand]
    shape, stride = _nested(exported["layout"]["shape"]), _nested(exported["layout"]["stride"])
    base = mode_offsets(shape[0], stride[0])[v + sizes[0] * (first + size * second)]
    modes = (shape[1][0], *shape[1][1]), (stride[1][0], *stride[1][1])
    own = functools.reduce(np.add.outer, map(mode_offsets, *modes))
    elements = np.zeros((int(threads.max()) + 1, *own.shape), np.int64)
    elements[threads] = base[:, None, None, None] + own
    return elements


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Kernel:
    """Everything exported about one kernel of a row."""

    row: TableRow
    part: str  # its name among the kernels of the row, "" for the only one
    tile: tuple[int, int]  # queries and keys
    plan: dict[str, Any]
    roles: list[dict[str, Any]]
    copies: list[dict[str, Any]]
    products: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The row's name, for an edited row with the changes, and which of its kernels it is:
        "sm90_bwd_bf16_d256/grad_kv"."""
        return f"{self.row.name}/{self.part}" if self.part else self.row.name

    @property
    def file_name(self) -> str:
        """What the names of files about the kernel begin with."""
        return self.name.replace("/", "_")

    @property
    def threads(self) -> int:
        """How many threads a CTA has."""
        return self.row.warps * 32

    def product(self, name: str) -> dict[str, Any]:
        """The product whose accumulator has this name."""
        return next(product for product in self.products if product["name"] == name)

    def tiles(self) -> dict[str, SharedTile]:
        """Each tensor's tile in shared memory, with the rows and columns that it has in global
        memory."""
        tiles = [shared_tile(copy["smem"]) for copy in self.copies if "smem" in copy]
        return {tile.tensor: tile for tile in tiles}

    def shape(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of a tensor's tile."""
        rows, cols = self.tiles()[tensor].address.shape
        return rows, cols


def kernels(requests: Iterable[Request]) -> list[Kernel]:
    """The exported layouts of all kernels of all requests."""
    wanted = list(requests)
    return [
        Kernel(
            request.row,
            kernel["name"],
            (kernel["tile"][0], kernel["tile"][1]),
            kernel["plan"],
            kernel["roles"],
            kernel["copies"],
            kernel["products"],
        )
        for request, exported in zip(wanted, export(wanted), strict=True)
        for kernel in exported
    ]
