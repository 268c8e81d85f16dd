"""Follows every element: global memory, shared memory, registers, MMA and back.

An address or a register holds the number of the element (r, c) that the kernel puts there, and -1
where it puts nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.model import (
    Array,
    Kernel,
    SharedTile,
    by_instruction,
    mma_elements,
    registers_by_instruction,
    shared_tile,
    swizzled,
    table,
)


@dataclass(frozen=True)
class TileCopy:
    """A copy to or from shared memory, [thread, instruction, value]."""

    name: str
    kind: str  # "load": global to shared, "store": shared to global, "accumulator", "operand"
    instruction: str
    tile: SharedTile
    address: Array  # in shared memory; of ldmatrix and stmatrix those of the row that a lane gives
    source: Array | None = None  # elements of the global tile
    target: Array | None = None
    accumulator: str = ""
    registers: Array | None = None  # [instruction, value]
    key: tuple[str, str, int] = ("", "", 0)  # of an operand: product, side, part
    # What the kernel's own arithmetic gives, where it has some, [thread, instruction]: addresses in
    # shared memory, in bytes, and the first element of each vector in the global tile.
    given: Array | None = None
    given_source: Array | None = None

    @property
    def values(self) -> int:
        """How many elements an instruction moves for a thread, or takes by the address that it
        gives."""
        return self.address.shape[2]

    @property
    def warps(self) -> Array:
        """The addresses as [warp, lane, instruction, value]."""
        threads, instructions, values = self.address.shape
        return self.address.reshape(threads // 32, 32, instructions, values)


@functools.lru_cache(maxsize=64)
def tile_copies(kernel: Kernel) -> list[TileCopy]:
    """The copies between global and shared memory and from accumulators to shared memory."""
    copies = []
    words = {"load": "global -> shared", "store": "shared -> global"}
    for exported in kernel.copies:
        if exported["kind"] == "fragment":
            copies.append(_fragment_store(exported))
        if exported["kind"] == "matrices":
            copies.append(_matrix_store(exported))
        if exported["kind"] not in words:
            continue
        tile = shared_tile(exported["smem"])
        values = exported["values"]
        target = by_instruction(exported["target"], values)
        source = by_instruction(exported["source"], values)
        inside = source if exported["kind"] == "store" else target
        copies.append(
            TileCopy(
                f"{exported['tensor']}: {words[exported['kind']]}",
                exported["kind"],
                exported["instruction"],
                tile,
                tile.of_element(inside),
                source,
                target,
                given=_given(exported, "given"),
                given_source=_given(exported, "given_source"),
            )
        )
    return copies


def _given(exported: dict[str, Any], key: str) -> Array | None:
    return np.array(exported[key], np.int64) if key in exported else None


def _fragment_store(exported: dict[str, Any]) -> TileCopy:
    """A copy that writes pairs of an accumulator where the MMA has them, without a tiled copy."""
    tile = shared_tile(exported["smem"])

    def pairs(values: Array) -> Array:  # [..., 2 x rows, rest, rest] -> [..., instruction, 2]
        lead = values.shape[:-3]
        split = values.reshape(*lead, values.shape[-3] // 2, 2, *values.shape[-2:])
        return np.moveaxis(split, -3, -1).reshape(*lead, -1, 2)

    target = pairs(mma_elements(exported["target"], "c"))
    return TileCopy(
        f"{exported['tensor']}: registers -> shared",
        "accumulator",
        exported["instruction"],
        tile,
        tile.of_element(target),
        None,
        target,
        exported["accumulator"],
        pairs(table(exported["registers"])),
        given=_given(exported, "given"),
    )


def _matrix_store(exported: dict[str, Any]) -> TileCopy:
    """A copy of an accumulator by stmatrix."""
    tile = shared_tile(exported["smem"])
    target = by_instruction(exported["target"], exported["values"])
    return TileCopy(
        f"{exported['tensor']}: registers -> shared",
        "accumulator",
        exported["instruction"],
        tile,
        tile.of_element(target),
        None,
        target,
        exported["accumulator"],
        registers_by_instruction(exported["registers"], exported["values"]),
    )


def parts_of(product: dict[str, Any]) -> list[dict[str, Any]]:
    """The operands a and b of a product, or of each part of it along k."""
    return product.get("parts", [product])


@functools.lru_cache(maxsize=64)
def operand_copies(kernel: Kernel) -> list[TileCopy]:
    """The copies from shared memory to the fragments of MMAs."""
    copies = []
    for product in kernel.products:
        for index, part in enumerate(parts_of(product)):
            for side in "ab":
                if part[side]["from"] == "shared":
                    key = product["name"], side, index
                    copies.append(_operand_copy(part[side], product["formula"], key))
    return copies


def _operand_copy(operand: dict[str, Any], formula: str, key: tuple[str, str, int]) -> TileCopy:
    tile = shared_tile(operand["smem"])
    address = by_instruction(operand["address"], operand["values"])
    offsets = np.resize(np.array(operand["warp_offsets"]), address.shape[0] // 32)
    address = address + np.repeat(offsets, 32)[:, None, None]
    part = f", part {key[2]}" if key[2] else ""
    return TileCopy(
        f"{tile.tensor}: shared -> registers ({formula}{part})",
        "operand",
        operand["instruction"],
        tile,
        swizzled(address, tile.swizzle),
        registers=registers_by_instruction(operand["registers"], operand["values"]),
        key=key,
        given=np.array(operand["given"], np.int64),
    )


def of_registers(copy: TileCopy) -> Array:
    """Addresses of the elements that threads receive in registers or write from registers,
    [thread, instruction, value]."""
    if hardware.moves_matrices(copy.instruction):
        addresses = hardware.matrix_elements(copy.instruction, copy.warps[..., 0])
        return addresses.reshape(-1, *addresses.shape[2:])
    return copy.address


def contents(kernel: Kernel) -> dict[str, Array]:
    """The element that the loads leave at each address of each tensor's buffer."""
    held = {}
    for copy in tile_copies(kernel):
        if copy.kind == "load":
            assert copy.source is not None
            held[copy.tile.tensor] = _put(copy.address, copy.source)
    for exported in kernel.copies:
        if exported["kind"] == "boxes" and not exported.get("stored"):
            address, elements = box_elements(exported)
            held[exported["tensor"]] = _put(address, elements)
    return held


def box_elements(exported: dict[str, Any]) -> tuple[Array, Array]:
    """Where TMA puts each element of a tile: [box, row, col] addresses and element numbers.

    CUDA Driver API, cuTensorMapEncodeTiled: a box arrives row-major, and the swizzle mode XORs the
    16-byte vector's place in a row of `span` bytes with bits 7 and up of the address.
    """
    rows, cols = exported["box"]
    tile_rows, bits = exported["rows"], exported["swizzle_bits"]
    row, col = np.arange(rows)[:, None], np.arange(cols)[None, :]
    addresses, elements = [], []
    for box in exported["boxes"]:
        addresses.append(swizzled(box["address"] + row * cols + col, (bits, 3, 3)))
        elements.append(box["row"] + row + tile_rows * (box["col"] + col))
    return np.stack(addresses), np.stack(elements)


def _put(address: Array, elements: Array) -> Array:
    held = np.full(int(address.max()) + 1, -1, np.int64)
    held[address.reshape(-1)] = elements.reshape(-1)
    return held


def at(held: Array, address: Array) -> Array:
    """The elements at these addresses; -1 outside the buffer."""
    inside = (address >= 0) & (address < held.size)
    return np.where(inside, held[np.where(inside, address, 0)], -1)


@dataclass(frozen=True)
class Operand:
    """(outer, k) of each value of an MMA operand: [thread, value, rest, k block], -1 unknown.

    Outer is m of A and n of B.
    """

    outer: Array
    k: Array


def _coordinates(elements: Array, rows: int) -> tuple[Array, Array]:
    return np.where(elements < 0, -1, elements % rows), np.where(elements < 0, -1, elements // rows)


def accumulator_elements(product: dict[str, Any]) -> Array:
    """[thread, value, rest m, rest n] of a product's accumulator, as elements of its M x N tile."""
    elements = mma_elements(product["c"]["expected"], "c")
    m, rows = product["tile"][0], product["c"]["rows"]
    row, col = elements % rows, elements // rows
    return np.concatenate([top + row + m * (left + col) for top, left in product["origins"]])


def accumulator(product: dict[str, Any]) -> Array:
    """[thread, register] of a product's accumulator, as elements of its M x N tile."""
    registers = table(product["c"]["registers"])
    elements = accumulator_elements(product)
    held = np.full((elements.shape[0], int(registers.max()) + 1), -1, np.int64)
    held[:, registers] = elements
    return held


class Trace:
    """The elements of one kernel, followed."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.contents = contents(kernel) | self.stored
        self._operands: dict[tuple[str, str, int], Operand] = {}
        self._copies = {copy.key: copy for copy in operand_copies(kernel)}

    def operand(self, product: dict[str, Any], side: str, part: int = 0) -> Operand:
        """The elements in the registers of an operand when its MMAs run."""
        key = product["name"], side, part
        if key not in self._operands:
            self._operands[key] = self._operand(parts_of(product)[part][side], key)
        return self._operands[key]

    def _operand(self, operand: dict[str, Any], key: tuple[str, str, int]) -> Operand:
        fragment = table(operand["fragment"])  # [value, rest, k block] -> register
        if operand["from"] == "registers":
            source = self.kernel.product(operand["accumulator"])
            held = accumulator(source)[:, fragment]
            return Operand(*_coordinates(held, source["tile"][0]))
        tensor, transposed = operand["smem"]["tensor"], operand["smem"]["transposed"]
        copy = self._copies[key]
        assert copy.registers is not None
        elements = at(self.contents[tensor], of_registers(copy))
        held = np.full((elements.shape[0], int(fragment.max()) + 1), -1, np.int64)
        held[:, copy.registers] = elements
        row, col = _coordinates(held[:, fragment], self.kernel.shape(tensor)[0])
        return Operand(col, row) if transposed else Operand(row, col)

    @functools.cached_property
    def stored(self) -> dict[str, Array]:
        """The element that the kernel leaves at each address of the tensors that it writes to
        shared memory."""
        held = {}
        for copy in tile_copies(self.kernel):
            if copy.kind == "accumulator":
                product = self.kernel.product(copy.accumulator)
                assert copy.registers is not None
                elements = accumulator(product)[:, copy.registers]
                held[copy.tile.tensor] = _put(of_registers(copy), elements)
        return held


@functools.lru_cache(maxsize=64)
def trace_of(kernel: Kernel) -> Trace:
    """The elements of a kernel, followed once."""
    return Trace(kernel)
