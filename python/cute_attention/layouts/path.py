"""`explain ROW`: follows an element from global memory to the MMAs, and a result back out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cute_attention.layouts import hardware
from cute_attention.layouts.errors import LayoutError
from cute_attention.layouts.grid import draw_grid, figure, mark, save, shade, ticks
from cute_attention.layouts.model import ELEMENT_BYTES, Array, Kernel
from cute_attention.layouts.pictures import VECTOR, bank_legend, draw_tile
from cute_attention.layouts.staged import NUMBER_BYTES, staged_sums
from cute_attention.layouts.trace import (
    TileCopy,
    Trace,
    accumulator,
    box_elements,
    of_registers,
    operand_copies,
    parts_of,
    tile_copies,
    trace_of,
)

_GLOBAL = {
    "q": "q[b, m_block * {m} + {row}, h, {col}]",
    "k": "k[b, n_block * {n} + {row}, h_kv, {col}]",
    "v": "v[b, n_block * {n} + {row}, h_kv, {col}]",
    "o": "out[b, m_block * {m} + {row}, h, {col}]",
    "grad_o": "grad_out[b, m_block * {m} + {row}, h, {col}]",
    "grad_q": "dq[b, m_block * {m} + {row}, h, {col}]",
    "grad_k": "dk[b, n_block * {n} + {row}, h_kv, {col}]",
    "grad_v": "dv[b, n_block * {n} + {row}, h_kv, {col}]",
}
_SHORT = {"do": "grad_o", "dq": "grad_q", "dk": "grad_k", "dv": "grad_v", "ds": "grad_s"}
# The results that leave a kernel, with the accumulators that hold them, and the gradient of each
# input.
_SUMS = {"o": "O", "grad_q": "dQ", "grad_k": "dK", "grad_v": "dV"}
_GRADIENTS = {"q": "grad_q", "k": "grad_k", "v": "grad_v"}


@dataclass(frozen=True)
class Element:
    """An element of a tensor's tile."""

    tensor: str
    row: int
    col: int


def element_of(tensor: str, row: int, col: int) -> Element:
    """The element that the command line asks for, which may call a gradient dq instead of
    grad_q."""
    return Element(_SHORT.get(tensor, tensor), row, col)


def _checked(kernel: Kernel, element: Element) -> None:
    tensors = kernel.tiles()
    if element.tensor not in tensors:
        raise LayoutError(f"explain: --tensor {element.tensor}, expected one of {list(tensors)}")
    rows, cols = kernel.shape(element.tensor)
    if not (0 <= element.row < rows and 0 <= element.col < cols):
        raise LayoutError(
            f"explain: element ({element.row}, {element.col}) is outside the {rows} x {cols} tile "
            f"of {element.tensor}"
        )


def _global(kernel: Kernel, element: Element) -> str:
    name = _GLOBAL.get(element.tensor, element.tensor + "[..., {row}, {col}]")
    m, n = kernel.tile
    place = name.format(m=m, n=n, row=element.row, col=element.col)
    sector = element.col * ELEMENT_BYTES // hardware.SECTOR_BYTES
    return f"{place}, in 32-byte sector {sector} of its row"


def _where(values: Array, wanted: int) -> Array:
    return np.argwhere(values == wanted)


def _loaded(kernel: Kernel, element: Element) -> Iterator[str]:
    rows = kernel.shape(element.tensor)[0]
    number = element.row + rows * element.col
    for copy in tile_copies(kernel):
        if copy.tile.tensor == element.tensor and copy.kind == "load":
            assert copy.source is not None
            thread, instruction, value = _where(copy.source, number)[0]
            yield (
                f"global -> shared: thread {thread} copies it in its {copy.instruction} number "
                f"{instruction}, element {value} of {copy.values}"
            )
    yield from _in_box(kernel, element.tensor, number, stored=False)


def _in_box(kernel: Kernel, tensor: str, number: int, stored: bool) -> Iterator[str]:
    """The box with which TMA copies an element of a tile to shared memory, or stores it."""
    for exported in kernel.copies:
        if exported["kind"] != "boxes" or exported["tensor"] != tensor:
            continue
        if exported.get("stored", False) == stored:
            box, row, col = _where(box_elements(exported)[1], number)[0]
            height, width = exported["box"]
            yield (
                f"{'shared -> global' if stored else 'global -> shared'}: TMA box {box} of "
                f"{len(exported['boxes'])} ({height} x {width}), its row {row}, column {col}"
            )


def _lies(kernel: Kernel, element: Element) -> str:
    tile = kernel.tiles()[element.tensor]
    address = int(tile.address[element.row, element.col]) * ELEMENT_BYTES
    buffers = {buffer["name"]: buffer for buffer in kernel.plan["buffers"]}
    offset = buffers[element.tensor]["offset"]
    return (
        f"shared memory: byte {address} of s{element.tensor.upper()} "
        f"(byte {offset + address} of the CTA's), bank {address // 4 % 32}, by {tile.notation}"
    )


def _operands(kernel: Kernel, tensor: str) -> Iterator[tuple[dict[str, Any], str, int]]:
    for product in kernel.products:
        for index, part in enumerate(parts_of(product)):
            for side in "ab":
                if part[side].get("smem", part[side]).get("tensor") == tensor:
                    yield product, side, index


def _instruction(copy: TileCopy, address: int) -> str:
    """The first instruction between registers and shared memory that moves the element at an
    address."""
    thread, instruction, _ = _where(of_registers(copy), address)[0]
    giver = _where(copy.address, address)
    same = giver[(giver[:, 0] // 32 == thread // 32) & (giver[:, 1] == instruction)]
    text = f"{copy.instruction} number {instruction} of warp {thread // 32}"
    if hardware.moves_matrices(copy.instruction) and len(same):
        lane = same[0][0] % 32
        text += f": lane {lane} gives the address of its 16 bytes (phase {lane // 8})"
    return text


def _multiplied(kernel: Kernel, trace: Trace, element: Element) -> Iterator[str]:
    copies = {copy.key: copy for copy in operand_copies(kernel)}
    address = int(kernel.tiles()[element.tensor].address[element.row, element.col])
    for product, side, part in _operands(kernel, element.tensor):
        operand = parts_of(product)[part][side]
        shared = operand.get("smem", operand)
        place = (element.row, element.col)
        outer, k = place[::-1] if shared["transposed"] else place
        letter = "mn"["ab".index(side)]
        if operand["from"] == "descriptors":
            yield (
                f"{product['formula']}: operand {side.upper()}, {letter} = {outer}, k = {k}, read "
                f"by {product['instruction']} number {k // 16} through its descriptor"
            )
            continue
        found = trace.operand(product, side, part)
        hits = np.argwhere((found.outer == outer) & (found.k == k))
        if not len(hits):
            continue  # another part of the product reads it
        thread, value, rest, block = hits[0]
        copy = copies[product["name"], side, part]
        yield f"shared -> registers: {_instruction(copy, address)}"
        holders = np.unique(hits[:, 0])
        warps = len(np.unique(holders // 32))
        also = ""
        if len(holders) > 1:
            also = f"; {len(holders)} threads hold it, in {warps} of {kernel.threads // 32} warps"
        yield (
            f"{product['formula']}: thread {thread} holds it as operand {side.upper()}, "
            f"{letter} = {outer}, k = {k}: value {value} of {product['instruction']} "
            f"({letter} tile {rest}, k block {block}){also}"
        )


def _accumulated(kernel: Kernel, name: str, row: int, col: int) -> str:
    product = kernel.product(name)
    thread, register = _where(accumulator(product), row + product["tile"][0] * col)[0]
    return f"thread {thread}, register {register}"


def _added(kernel: Kernel, number: int) -> Iterator[str]:
    """The way of an element of dQ to its sum in global memory and back."""
    place = "registers"
    for staged in staged_sums(kernel):
        thread, vector, index = _where(staged.elements, number)[0]
        address = (staged.vectors[thread, vector] * staged.numbers + index) * NUMBER_BYTES
        yield (
            f"registers -> shared: thread {thread} writes it to byte {address} of "
            f"s{staged.tensor.upper()}, in its vector number {vector} of {staged.numbers} floats"
        )
        place = "shared"
    yield (
        f"{place} -> global: added to its fp32 sum over the blocks of keys; a kernel of its own "
        "reads the sums back into the same registers"
    )


def keeps_its_sums(product: dict[str, Any]) -> bool:
    """Whether the accumulator of a product that leaves a kernel has the sums of all its steps."""
    return " += " in product["formula"]


def _written(kernel: Kernel, tensor: str, row: int, col: int) -> Iterator[str]:
    """The steps of an element of an output."""
    name = _SUMS[tensor]
    number = row + kernel.product(name)["tile"][0] * col
    yield f"{name}[{row}, {col}] is summed in {_accumulated(kernel, name, row, col)}"
    if not keeps_its_sums(kernel.product(name)):
        yield from _added(kernel, number)
    wrote = False
    for copy in tile_copies(kernel):
        if copy.tile.tensor != tensor:
            continue
        assert copy.target is not None
        thread, instruction, value = _where(copy.target, number)[0]
        address = int(copy.address[thread, instruction, value]) * ELEMENT_BYTES
        words = {
            "accumulator": f"registers -> shared: thread {thread} writes it to byte {address} "
            f"of s{tensor.upper()}",
            "store": f"shared -> global: thread {thread} copies it in its store number "
            f"{instruction}, element {value} of {copy.values}",
        }
        wrote = True
        yield words[copy.kind]
    yield from _in_box(kernel, tensor, number, stored=True)
    if not wrote:
        yield "registers -> global: exchanged among the 4 threads of its row, stored 16 bytes each"
    yield _global(kernel, Element(tensor, row, col))


def _from_accumulator(kernel: Kernel, element: Element) -> Iterator[str]:
    """The steps of an element of P or dS, which MMAs of other warps read from shared memory."""
    for copy in tile_copies(kernel):
        if copy.tile.tensor == element.tensor and copy.kind == "accumulator":
            name = copy.accumulator
            held = _accumulated(kernel, name, element.row, element.col)
            yield (
                f"{name}[{element.row}, {element.col}] is summed in {held}, where {element.tensor} "
                "takes its place"
            )
            if hardware.moves_matrices(copy.instruction):
                address = int(copy.tile.address[element.row, element.col])
                yield f"registers -> shared: {_instruction(copy, address)}"
            else:
                yield "registers -> shared: the same thread writes it where its MMA has it"


def steps(kernel: Kernel, element: Element) -> Iterator[str]:
    """All steps of an element, in order."""
    _checked(kernel, element)
    if element.tensor in _SUMS:
        yield from _written(kernel, element.tensor, element.row, element.col)
        return
    loaded = list(_loaded(kernel, element))
    if loaded:
        yield _global(kernel, element)
        yield from loaded
    else:
        yield from _from_accumulator(kernel, element)
    yield _lies(kernel, element)
    yield from _multiplied(kernel, trace_of(kernel), element)
    if kernel.row.direction == "backward":
        gradient = _GRADIENTS.get(element.tensor, "")
        if _SUMS.get(gradient) in [product["name"] for product in kernel.products]:
            yield from _written(kernel, gradient, element.row, element.col)
        return
    if element.tensor in ("q", "k"):
        at = (element.row, 0) if element.tensor == "q" else (0, element.row)
        shared = "p" in kernel.tiles()
        yield (
            f"S[{at[0]}, {at[1]}] is one of the sums it goes into: "
            f"{_accumulated(kernel, 'S', *at)}, which becomes P[{at[0]}, {at[1]}] in "
            + ("shared memory, for all warps of the same queries" if shared else "place")
        )
    row = element.row if element.tensor in ("q", "p") else 0
    if element.col < kernel.product("O")["tile"][1]:
        yield from _written(kernel, "o", row, element.col)


def words(kernel: Kernel, element: Element) -> str:
    """The steps as numbered lines of text."""
    lines = [f"{kernel.name}: {element.tensor} tile, row {element.row}, column {element.col}"]
    lines += [f"{number}. {step}" for number, step in enumerate(steps(kernel, element), 1)]
    return "\n".join(lines)


def _sum_of(kernel: Kernel, element: Element) -> tuple[dict[str, Any], tuple[int, int]]:
    """A product, and the row and column of the sum in it that the element is or is added to."""
    for copy in tile_copies(kernel):
        if copy.tile.tensor == element.tensor and copy.kind == "accumulator":
            return kernel.product(copy.accumulator), (element.row, element.col)
    product, side, part = next(_operands(kernel, element.tensor))
    operand = parts_of(product)[part][side]
    outer = element.col if operand.get("smem", operand)["transposed"] else element.row
    return product, (outer, 0) if side == "a" else (0, outer)


def pictures(kernel: Kernel, element: Element, folder: Path) -> list[Path]:
    """Draws the element in shared memory and in the accumulator of O; returns the files."""
    _checked(kernel, element)
    tile = kernel.tiles()[element.tensor]
    first = element.row // 8 * 8
    first = min(first, max(tile.address.shape[0] - 16, 0))
    created = figure(17, 6)
    left, right = created.subplots(1, 2, width_ratios=[tile.address.shape[1] // VECTOR + 3, 16])
    draw_tile(left, tile, first)
    mark(left, element.row - first, element.col // VECTOR)
    bank_legend(left)
    product, place = _sum_of(kernel, element)
    name = product["name"]
    m, n, _ = product["tile"]
    held = accumulator(product)
    owner = np.zeros(m * n, np.int64)
    register = np.zeros(m * n, np.int64)
    for thread, elements in enumerate(held):
        owner[elements], register[elements] = thread, np.arange(held.shape[1])
    row0, col0 = place[0] // 16 * 16, place[1] // 16 * 16
    cols = min(16, n - col0)
    labels = [
        [f"T{owner[row + m * col]}\nr{register[row + m * col]}" for col in range(col0, col0 + cols)]
        for row in range(row0, row0 + 16)
    ]
    draw_grid(
        right,
        (16, cols),
        lambda row, col: shade(int(owner[row0 + row + m * (col0 + col)]) % 32, 32),
        lambda row, col: labels[row][col],
        5.5,
    )
    ticks(
        right,
        [str(row0 + row) for row in range(16)],
        [str(col0 + col) for col in range(cols)],
    )
    mark(right, place[0] - row0, place[1] - col0)
    right.set_title(f"{name}: thread and register; framed: a sum it is or goes into", fontsize=8)
    created.suptitle(
        f"{kernel.name}: {element.tensor} tile, row {element.row}, column {element.col}", fontsize=9
    )
    name = f"{kernel.file_name}_path_{element.tensor}_{element.row}_{element.col}"
    return save(created, folder, name)
